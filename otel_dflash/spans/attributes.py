"""Attributes of spans, from records: always in the same order, under the names of semconv."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from otel_dflash import semconv
from otel_dflash.recording.catalog import RingNames
from otel_dflash.recording.record_types import AttributeRecord, ConsumedRecord, StepRecord, signed
from otel_dflash.records import RESIDENCE_NS_MAX, ValueType

AttributeValue = str | int | float | bool
Attributes = dict[str, AttributeValue]

_ENTRY_BYTES: Final = 20  # upper estimate of an attribute's tags, lengths and number


def step_attributes(record: StepRecord, names: RingNames) -> Attributes:
    """Return the attributes of a step's span."""
    attributes: Attributes = {}
    thread = names.thread(record.thread)
    if thread is not None:
        attributes[semconv.THREAD_ID], attributes[semconv.THREAD_NAME] = thread
    if record.number is not None:
        attributes[semconv.STEP] = record.number
    if record.tokens is not None:
        attributes[semconv.BATCH_TOKENS] = record.tokens
    if record.loss_tokens is not None:
        attributes[semconv.BATCH_LOSS_TOKENS] = record.loss_tokens
    if record.bucket:
        attributes[semconv.BUCKET_ID] = names.text(record.bucket)
    if record.error:
        attributes[semconv.ERROR_TYPE] = names.text(record.error)
    return attributes


def item_attributes(record: ConsumedRecord, names: RingNames, wall_offset_ns: int) -> Attributes:
    """Return the attributes of a consumed item: of the link to its producer, and of the event of its get."""
    attributes: Attributes = {}
    queue = names.queue(record.queue)
    if queue is not None:
        attributes[semconv.QUEUE_NAME] = queue.name
    residence_ns = record.get_ns + wall_offset_ns - record.put_wall_ns
    if abs(residence_ns) <= RESIDENCE_NS_MAX:
        # Another host's clock may place the put after the get.
        attributes[semconv.QUEUE_RESIDENCE] = max(0, residence_ns) / 1e9
    if record.bucket:
        attributes[semconv.BUCKET_ID] = names.text(record.bucket)
    return attributes


def user_attributes(records: Iterable[AttributeRecord], names: RingNames) -> Attributes:
    """Return what the user set; if a key occurs twice, the last value counts."""
    attributes: Attributes = {}
    for record in records:
        key = names.text(record.key)
        key = semconv.ATTRIBUTE_NAMES.get(key) or (key if "." in key else semconv.ATTRIBUTE_PREFIX + key)
        attributes[key] = _value(record, names)
    return attributes


def otlp_bytes(attributes: Mapping[str, AttributeValue]) -> int:
    """Return an upper estimate of the attributes' size in OTLP."""
    size = 0
    for key, value in attributes.items():
        size += _ENTRY_BYTES + len(key)
        if isinstance(value, str):
            size += len(value) if value.isascii() else 4 * len(value)
    return size


def _value(record: AttributeRecord, names: RingNames) -> AttributeValue:
    if record.value_type == ValueType.FLOAT:
        number: float = struct.unpack("<d", record.value.to_bytes(8, "little"))[0]
        return number
    if record.value_type == ValueType.TEXT:
        return names.text(record.value)
    if record.value_type == ValueType.BOOL:
        return bool(record.value)
    return signed(record.value)
