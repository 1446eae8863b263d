"""Records with named fields: what the eight words of a slot mean, kind by kind (layout in records.py).

Ids of names are those of the ring that the record comes from; 0 stands for none. Times are monotonic ns,
except those named `wall`: put times cross hosts, so they are anchored wall time.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from otel_dflash.records import (
    BUCKET_MASK,
    ERROR_MASK,
    KIND_MASK,
    KIND_SHIFT,
    NAME_MASK,
    NAME_SHIFT,
    NUMBER_SHIFT,
    UNSET,
)

Words = tuple[int, ...]
"""The eight words of a slot, unsigned."""

HEAD_WORD: Final = 0  # lap, kind, name and error; the same word in every kind, as is
STEP_WORD: Final = 3  # step id


class StepRecord(NamedTuple):
    """The end of a step."""

    step: int
    start_ns: int
    end_ns: int
    thread: int  # name id
    error: int  # name id of the error type
    number: int | None  # the user's own number, None when not set
    tokens: int | None  # signed
    loss_tokens: int | None  # signed
    bucket: int  # name id
    root: int  # step id, 0 for this step itself

    @classmethod
    def decode(cls, words: Words) -> StepRecord:
        """Return the record of a slot of kind STEP."""
        head, start_ns, end_ns, step, tokens, loss_tokens, labels, root = words
        return cls(
            step,
            start_ns,
            end_ns,
            head >> NAME_SHIFT & NAME_MASK,
            head & ERROR_MASK,
            (labels >> NUMBER_SHIFT) - 1 if labels >> NUMBER_SHIFT else None,
            None if tokens == UNSET else signed(tokens),
            None if loss_tokens == UNSET else signed(loss_tokens),
            labels & BUCKET_MASK,
            root,
        )


class AttributeRecord(NamedTuple):
    """One value that the user set on a step."""

    step: int
    time_ns: int
    key: int  # name id
    value_type: int  # records.ValueType
    value: int  # unsigned word, of type `value_type`

    @classmethod
    def decode(cls, words: Words) -> AttributeRecord:
        """Return the record of a slot of kind ATTRIBUTE."""
        head, time_ns, value_type, step, value, *_ = words
        return cls(step, time_ns, head >> NAME_SHIFT & NAME_MASK, value_type, value)


class ConsumedRecord(NamedTuple):
    """An item that a step took out of a queue."""

    step: int
    get_ns: int
    put_wall_ns: int
    queue: int  # name id
    root: int  # step id of the item's trace, 0 when it was put outside a step
    producer: int  # id of the step that put it, 0 when it was put outside a step
    bucket: int  # name id
    fixed_root: bool  # whether the step joined the item's trace

    @classmethod
    def decode(cls, words: Words) -> ConsumedRecord:
        """Return the record of a slot of kind CONSUMED."""
        head, get_ns, put_wall_ns, step, root, producer, bucket, _ = words
        queue = head >> NAME_SHIFT & NAME_MASK
        return cls(step, get_ns, put_wall_ns, queue, root, producer, bucket, bool(head & ERROR_MASK))


class ResumedRecord(NamedTuple):
    """A step that continues the work of another step and has no span of its own."""

    step: int
    time_ns: int
    put_wall_ns: int
    root: int  # step id
    resumed_step: int  # id of the other step

    @classmethod
    def decode(cls, words: Words) -> ResumedRecord:
        """Return the record of a slot of kind RESUMED."""
        _, time_ns, put_wall_ns, step, root, resumed_step, *_ = words
        return cls(step, time_ns, put_wall_ns, root, resumed_step)


def kind_of(head: int) -> int:
    """Return the kind in word 0 of a slot: a records.Kind, unless the slot is malformed."""
    return head >> KIND_SHIFT & KIND_MASK


def signed(word: int) -> int:
    """Return an unsigned word read as two's complement."""
    return word - (1 << 64) if word >> 63 else word
