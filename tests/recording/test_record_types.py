"""Slots, packed by hand as records.py draws them, and the fields they are decoded to."""

from __future__ import annotations

from otel_dflash.recording.record_types import (
    AttributeRecord,
    ConsumedRecord,
    ResumedRecord,
    StepRecord,
    kind_of,
)
from otel_dflash.records import UNSET, Kind

STEP = (7 << 28) + 3


def head(kind: Kind, name: int, error: int) -> int:
    return 0xABCDEF << 40 | kind << 32 | name << 16 | error


def test_every_field_is_decoded_and_the_lap_is_not() -> None:
    minus_two = (1 << 64) - 2
    slots = [
        (head(Kind.STEP, 5, 6), 10, 20, STEP, 512, minus_two, 42 << 16 | 9, 77),
        (head(Kind.ATTRIBUTE, 5, 0), 10, 1, STEP, minus_two, 0, 0, 0),
        (head(Kind.CONSUMED, 5, 1), 10, 20, STEP, 77, 78, 9, 0),
        (head(Kind.RESUMED, 0, 0), 10, 20, STEP, 77, 78, 0, 0),
    ]
    assert [kind_of(words[0]) for words in slots] == [
        Kind.STEP,
        Kind.ATTRIBUTE,
        Kind.CONSUMED,
        Kind.RESUMED,
    ]
    types = (StepRecord, AttributeRecord, ConsumedRecord, ResumedRecord)
    assert [record.decode(words) for record, words in zip(types, slots, strict=True)] == [
        StepRecord(
            step=STEP,
            start_ns=10,
            end_ns=20,
            thread=5,
            error=6,
            number=41,
            tokens=512,
            loss_tokens=-2,
            bucket=9,
            root=77,
        ),
        AttributeRecord(step=STEP, time_ns=10, key=5, value_type=1, value=minus_two),
        ConsumedRecord(
            step=STEP, get_ns=10, put_wall_ns=20, queue=5, root=77, producer=78, bucket=9, fixed_root=True
        ),
        ResumedRecord(step=STEP, time_ns=10, put_wall_ns=20, root=77, resumed_step=78),
    ]


def test_what_nobody_set_on_a_step_is_none() -> None:
    record = StepRecord.decode((head(Kind.STEP, 0, 0), 10, 20, STEP, UNSET, UNSET, 0, 0))
    assert (record.number, record.tokens, record.loss_tokens) == (None, None, None)
