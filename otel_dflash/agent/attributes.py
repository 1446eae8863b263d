"""What a record says, as span attributes: always in the same order, under the names of semconv. No SDK here."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

from otel_dflash import semconv
from otel_dflash.agent.catalog import RingNames
from otel_dflash.agent.steps import Words
from otel_dflash.records import BUCKET_MASK, ERROR_MASK, NAME_MASK, NAME_SHIFT, NUMBER_SHIFT, UNSET, ValueType

AttributeValue = str | int | float | bool
Attributes = dict[str, AttributeValue]

_ENTRY_BYTES: Final = 20  # upper estimate of an attribute's tags, lengths and number


def step_attributes(record: Words, names: RingNames) -> Attributes:
    """Return what a STEP record says."""
    attributes: Attributes = {}
    thread = names.thread(record[0] >> NAME_SHIFT & NAME_MASK)
    if thread is not None:
        attributes[semconv.THREAD_ID], attributes[semconv.THREAD_NAME] = thread
    number = record[6] >> NUMBER_SHIFT
    if number:
        attributes[semconv.STEP] = number - 1
    if record[4] != UNSET:
        attributes[semconv.BATCH_TOKENS] = _signed(record[4])
    if record[5] != UNSET:
        attributes[semconv.BATCH_LOSS_TOKENS] = _signed(record[5])
    bucket = record[6] & BUCKET_MASK
    if bucket:
        attributes[semconv.BUCKET_ID] = names.text(bucket)
    error = record[0] & ERROR_MASK
    if error:
        attributes[semconv.ERROR_TYPE] = names.text(error)
    return attributes


def item_attributes(record: Words, names: RingNames, wall_offset_ns: int) -> Attributes:
    """Return what a CONSUMED record says: on the link to the item's producer and on the event of its get."""
    attributes: Attributes = {}
    queue = names.queue(record[0] >> NAME_SHIFT & NAME_MASK)
    if queue is not None:
        attributes[semconv.QUEUE_NAME] = queue.name
    # A put time crosses processes, so it is anchored wall time; another host's clock may place it after the get.
    attributes[semconv.QUEUE_RESIDENCE] = max(0, record[1] + wall_offset_ns - record[2]) / 1e9
    if record[6]:
        attributes[semconv.BUCKET_ID] = names.text(record[6])
    return attributes


def user_attributes(records: list[Words], names: RingNames) -> Attributes:
    """Return what ATTRIBUTE records say; of one key the last value counts."""
    attributes: Attributes = {}
    for record in records:
        key = names.text(record[0] >> NAME_SHIFT & NAME_MASK)
        key = semconv.ATTRIBUTE_NAMES.get(key) or (key if "." in key else semconv.ATTRIBUTE_PREFIX + key)
        attributes[key] = _value(record[2], record[4], names)
    return attributes


def encoded_bytes(attributes: Mapping[str, AttributeValue]) -> int:
    """Return an upper estimate of the attributes' size in OTLP."""
    size = 0
    for key, value in attributes.items():
        size += _ENTRY_BYTES + len(key)
        if isinstance(value, str):
            size += len(value) if value.isascii() else 4 * len(value)
    return size


def _value(value_type: int, word: int, names: RingNames) -> AttributeValue:
    if value_type == ValueType.FLOAT:
        number: float = struct.unpack("<d", word.to_bytes(8, "little"))[0]
        return number
    if value_type == ValueType.TEXT:
        return names.text(word)
    if value_type == ValueType.BOOL:
        return bool(word)
    return _signed(word)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
