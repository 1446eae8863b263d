"""Which trace a span goes to: a trace holds at most SPANS_PER_TRACE spans, and the spans that it has no room
for go to linked ones.

The rule, so that ids stay computable:

* A root step's own span always lies in its trace; room for it is kept from the first span on.
* A step that consumes an item joins the item's trace while that has room for all of the step's spans, or for
  its own span at least when they are too many for any trace. Else it begins a trace of its own, under its own
  id as if it were a root; the links to its items are there in any case.
* The phases of a step that find no room go, in the order of their starts, to further traces of
  SPANS_PER_TRACE spans each, under the id of the first phase's record. A span whose parent lies in another
  trace has a link to it instead of a parent.

So a step lies in the trace of its root or in the trace of its own id: every process can compute the first,
and the second is remembered here. An agent counts only the spans that it sends itself, and remembers only the
newest TRACES_MAX traces.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from otel_dflash.spans.state_codec import decode_bytes, decode_words, encode_bytes, encode_words

SPANS_PER_TRACE: Final = 200
TRACES_MAX: Final = 8192


class Traces:
    """How full each trace is, by its root. One thread; the same calls give the same answers."""

    def __init__(self) -> None:
        self._spans: OrderedDict[int, int] = OrderedDict()
        """Root -> spans of its trace, its own included from the start; the least recently used first."""
        self._joined: OrderedDict[int, bool] = OrderedDict()
        """Step that is not a root -> whether its span lies in its root's trace."""

    def locate(self, root: int, step: int) -> int:
        """Return the root of the trace in which the span of `step` lies."""
        return root if step == root or self._joined.get(step, True) else step

    def join(self, root: int, step: int, spans: int) -> int:
        """Return what `locate` returns, and decide it where that is open. `spans` counts the spans of the
        step to send now, its own included."""
        if step != root and step not in self._joined:
            sent = self._spans.get(root, 1)
            fits = sent + spans <= SPANS_PER_TRACE or (spans > SPANS_PER_TRACE and sent < SPANS_PER_TRACE)
            _put(self._joined, step, fits)
            _put(self._spans, root, sent + fits)  # also when it is full: so it stays among the newest
        return self.locate(root, step)

    def take(self, root: int, phases: int) -> int:
        """Return for how many of `phases` more spans the trace of `root` has room, and count those as
        sent."""
        sent = self._spans.get(root, 1)
        if sent + phases > SPANS_PER_TRACE:
            phases = max(0, SPANS_PER_TRACE - sent)
        _put(self._spans, root, sent + phases)
        return phases

    def state(self) -> dict[str, Any]:
        """Return all that a restart needs, ready for JSON."""
        return {
            "roots": encode_words(self._spans),
            "spans": encode_bytes(self._spans.values()),
            "steps": encode_words(self._joined),
            "joined": encode_bytes(self._joined.values()),
        }

    def restore(self, state: Any) -> None:
        """Replace the state by what `state` returned.

        Raises:
            ValueError: A text in it is damaged, or two do not match.
            TypeError: A value in it has the wrong type.
            KeyError: A key is missing.
        """
        self._spans = OrderedDict(
            zip(decode_words(state["roots"]), decode_bytes(state["spans"]), strict=True)
        )
        joined = map(bool, decode_bytes(state["joined"]))
        self._joined = OrderedDict(zip(decode_words(state["steps"]), joined, strict=True))


def _put(table: OrderedDict[int, Any], key: int, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > TRACES_MAX:
        table.popitem(last=False)
