"""A finished span as plain values, for any way of sending it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from otel_dflash.spans.attributes import Attributes


class SpanKind(IntEnum):
    """The kinds we use, as numbered in OTLP."""

    INTERNAL = 1
    PRODUCER = 4
    CONSUMER = 5


class SpanContext(NamedTuple):
    """What identifies a span."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0
    is_remote: bool = False  # seen from another step
    is_sampled: bool = True  # False when its trace is not sent, as far as is known


class Link(NamedTuple):
    """A span that another one is related to."""

    context: SpanContext
    attributes: Attributes


class Event(NamedTuple):
    """Something that happened during a span."""

    name: str
    time_ns: int  # wall
    attributes: Attributes


class SpanResource(NamedTuple):
    """The role and process that a span belongs to."""

    role: str
    pid: int


class Span(NamedTuple):
    """One span. Spans may share their attributes, so nobody changes them."""

    name: str
    kind: SpanKind
    context: SpanContext
    parent: SpanContext | None  # of the same trace
    start_ns: int  # wall
    end_ns: int  # wall
    attributes: Attributes
    links: Sequence[Link]
    events: Sequence[Event]
    is_error: bool  # the status: ERROR or UNSET
    resource: SpanResource
    otlp_bytes: int  # upper estimate of its size in OTLP, without its resource
