"""Which trace a span goes to: a trace holds at most SPANS_PER_TRACE spans, and what has no room goes on in a linked one.

The rule, so that ids stay computable:

* A root step's own span always lies in its trace; its place is kept from the first span on.
* A step that goes on with another's trace joins it while there is room for all of the step, or for its own span at least when it is too
  large for any trace. Else it begins a trace of its own, under its own id as if it were a root; the links to its items are there anyway.
* The phases of a step that find no room go, in the order of their starts, to traces of their own of SPANS_PER_TRACE spans each, under the
  id of the first one's record. A span whose parent lies in another trace has none, and a link to it instead.

So a step lies in the trace of its root, or in that of its own id: every process knows the first, the second is remembered here. How full a
trace is, each agent knows of the spans that it sends itself, and of the newest TRACES_MAX traces.
"""

from __future__ import annotations

import base64
import struct
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any, Final

SPANS_PER_TRACE: Final = 200
TRACES_MAX: Final = 8192


class Traces:
    """How full each trace is, by its root. One thread; the same calls give the same answers."""

    def __init__(self) -> None:
        self._spans: OrderedDict[int, int] = OrderedDict()  # root: spans, with the place of its own; the least recently used first
        self._joined: OrderedDict[int, bool] = OrderedDict()  # step that is no root: whether its span lies in its root's trace

    def locate(self, root: int, step: int) -> int:
        """Return the root of the trace in which the span of `step` lies."""
        return root if step == root or self._joined.get(step, True) else step

    def join(self, root: int, step: int, spans: int) -> int:
        """Return what `locate` does, after deciding it if it is not yet: `spans` are those to send of the step now, its own included."""
        if step != root and step not in self._joined:
            sent = self._spans.get(root, 1)
            fits = sent + spans <= SPANS_PER_TRACE or (spans > SPANS_PER_TRACE and sent < SPANS_PER_TRACE)
            _put(self._joined, step, fits)
            _put(self._spans, root, sent + fits)  # a full one that is still asked for is not forgotten
        return self.locate(root, step)

    def take(self, root: int, phases: int) -> int:
        """Return for how many of `phases` more spans the trace of `root` has room; they are counted as sent."""
        sent = self._spans.get(root, 1)
        if sent + phases > SPANS_PER_TRACE:
            phases = max(0, SPANS_PER_TRACE - sent)
        _put(self._spans, root, sent + phases)
        return phases

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, ready for JSON."""
        return {
            "roots": encoded_words(self._spans),
            "spans": encoded_bytes(self._spans.values()),
            "steps": encoded_words(self._joined),
            "joined": encoded_bytes(self._joined.values()),
        }

    def restore(self, state: Any) -> None:
        """Take up what `state` returned.

        Raises:
            ValueError: Not what `state` returns.
            TypeError: Neither.
            KeyError: Neither.
        """
        self._spans = OrderedDict(zip(decoded_words(state["roots"]), decoded_bytes(state["spans"]), strict=True))
        joined = map(bool, decoded_bytes(state["joined"]))
        self._joined = OrderedDict(zip(decoded_words(state["steps"]), joined, strict=True))


def encoded_words(words: Collection[int]) -> str:
    """Return unsigned 64-bit integers as base64 text."""
    return encoded_bytes(struct.pack(f"<{len(words)}Q", *words))


def encoded_bytes(values: Iterable[int]) -> str:
    """Return integers below 256 as base64 text."""
    return base64.b64encode(bytes(values)).decode()


def decoded_words(text: str) -> tuple[int, ...]:
    """Return what `encoded_words` was given.

    Raises:
        ValueError: Not such a text.
        TypeError: Not a text.
    """
    data = decoded_bytes(text)
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are no whole words")
    return struct.unpack(f"<{len(data) // 8}Q", data)


def decoded_bytes(text: str) -> bytes:
    """Return what `encoded_bytes` was given.

    Raises:
        ValueError: Not such a text.
        TypeError: Not a text.
    """
    return base64.b64decode(text, validate=True)


def _put(table: OrderedDict[int, Any], key: int, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > TRACES_MAX:
        table.popitem(last=False)
