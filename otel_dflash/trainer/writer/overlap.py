"""Steps of several workers that are open in one thread at once: nested ones, or those of asyncio tasks.

Which of them an item belongs to is told by the phase around its put or get, never guessed. Only where two
steps are open is anything looked up; one open step costs nothing here.
"""

from __future__ import annotations

from typing import Any

from otel_dflash.records import Counter
from otel_dflash.ring import Ring
from otel_dflash.trainer.writer.protocol import OpenStep, Writer

PUT_STATE, GET_STATE = "backpressured", "starved"


class Overlap:
    """Stands for the writers whose steps are open in a thread, in the place of one."""

    __slots__ = ("writers",)

    def __init__(self, writers: tuple[Writer, ...]) -> None:
        """Stand for at least two writers, in the order in which their steps began."""
        self.writers = writers

    def produced(self, count: int = 1) -> int:
        """Return a context of the step that is putting an item; 0 if that cannot be told, which is counted
        with the item."""
        writer = self._within(PUT_STATE)
        if writer is not None:
            return writer.produced(count)
        return self._unmatched() if count else 0

    def bucket(self) -> str | int | None:
        """Return the bucket of the step that is putting an item."""
        writer = self._within(PUT_STATE)
        return writer.bucket() if writer is not None else None

    def received(self, queue_text: str, t: int, context: int, bucket_text: str | None) -> None:
        """Give a context to the step that is getting an item; count it if that cannot be told."""
        writer = self._within(GET_STATE)
        if writer is not None:
            writer.received(queue_text, t, context, bucket_text)
        else:
            self._unmatched()

    def ring(self) -> Ring:
        """Return the ring of the newest step."""
        return self.writers[-1].ring()

    def _within(self, state: str) -> Writer | None:
        """Return the only writer whose step is open, else the only one in a phase of that state."""
        inside = [writer for writer in self.writers if writer.step_id()]
        if len(inside) > 1:
            inside = [writer for writer in inside if writer.is_in(state)]
        return inside[0] if len(inside) == 1 else None

    def _unmatched(self) -> int:
        self.ring().count(Counter.UNMATCHED)
        return 0


def beside(before: OpenStep, writer: Writer) -> OpenStep:
    """Return what stands for the open steps of a thread once that of `writer` has begun, given what did."""
    others: Any = before.writers if isinstance(before, Overlap) else (before,)
    return _standing_for((*(other for other in others if other.step_id() and other is not writer), writer))


def without(before: OpenStep | None, writer: Writer) -> OpenStep | None:
    """Return what stands for the open steps of a thread once that of `writer` has ended."""
    if not isinstance(before, Overlap):
        return None if before is writer else before
    return _standing_for(tuple(other for other in before.writers if other is not writer))


def _standing_for(writers: tuple[Writer, ...]) -> OpenStep:
    return writers[0] if len(writers) == 1 else Overlap(writers)
