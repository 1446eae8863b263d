"""What a worker may ask of a writer, whichever implementation beside this file made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from otel_dflash.ring import Ring


Enter = Callable[[], Any]
Exit = Callable[..., None]
"""Takes what `__exit__` takes, or what `end` does: nothing, or the error alone."""


class OpenStep(Protocol):
    """What the hooks of a queue ask of the step that is open in their thread."""

    def produced(self, count: int = 1, /) -> int:
        """Return the context of an item that is being put; 0 if there is none.

        With `count` 0 the item is not handed on yet, and not counted.
        """

    def bucket(self) -> str | int | None:
        """Return the step's bucket."""

    def received(self, queue_text: str, t: int, context: int, bucket_text: str | None, /) -> None:
        """Take the context of an item that was got."""

    def ring(self) -> Ring:
        """Return a ring that counts what is lost."""


class Writer:
    """What a worker calls to record: closures over its ring, made by an implementation beside this file."""

    make_phase: Callable[[str, str], tuple[Enter, Exit]]
    step_enter: Enter
    step_exit: Exit
    step_cancel: Callable[[], None]
    set_values: Callable[..., None]
    produced: Callable[..., int]
    """Takes 0 for an item that is not handed on yet, and counts it only without that."""
    consumed: Callable[[int], None]
    received: Callable[[str, int, int, str | None], None]
    resume: Callable[[int], None]
    close: Callable[[], None]
    orphan: Callable[[], None]
    step_id: Callable[[], int]
    bucket: Callable[[], str | int | None]
    is_in: Callable[[str], bool]
    """Whether a phase of that state is open in the open step."""
    ring: Callable[[], Ring]


class Bind(Protocol):
    """How an implementation is asked for a writer."""

    def __call__(
        self,
        make_ring: Callable[[], Ring],
        control: memoryview,
        wall_offset_ns: int,
        step: Any,
        current: dict[int, OpenStep | None],
        pending: dict[int, list[Any]],
    ) -> Writer:
        """Return a writer into a ring of its own.

        Args:
            make_ring: Creates a ring for this process; called here, and again in a child after a fork.
            control: The session's control words; word 0 is the capture detail.
            wall_offset_ns: Anchored wall time minus monotonic time.
            step: What entering a step returns.
            current: Thread -> the writer whose step is open there, an `Overlap` of several.
            pending: Thread -> (Contexts, time, entry) after each other, received outside a step.

        Raises:
            OSError: `make_ring` cannot make the first ring.
        """
