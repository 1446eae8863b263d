"""What the user's threads hold: Worker, Step, Phase. The recording itself is in writer.py."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from otel_dflash.config import ConfigError
from otel_dflash.records import State

if TYPE_CHECKING:
    from otel_dflash.ring import Ring

Enter = Callable[[], Any]
Exit = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]

USUAL_PHASES: Final = {
    "queue_get": State.STARVED,
    "prefetch_get": State.STARVED,
    "queue_put": State.BACKPRESSURED,
    "model_forward": State.BUSY,
    "pack_hidden": State.BUSY,
    "forward": State.BUSY,
    "backward": State.BUSY,
    "optimizer": State.BUSY,
    "h2d": State.BUSY,
    "d2h": State.BUSY,
}
STATES: Final = {state.name.lower(): state for state in State if state is not State.OTHER}


class Writer:
    """What a worker calls to record: closures over its ring, made by writer.py."""

    make_phase: Callable[[str, str], tuple[Enter, Exit]]
    step_enter: Enter
    step_exit: Exit
    set_values: Callable[..., None]
    produced: Callable[[], int]
    consumed: Callable[[int], None]
    received: Callable[[str, int, int, str | None], None]
    resume: Callable[[int], None]
    close: Callable[[], None]
    orphan: Callable[[], None]
    step_id: Callable[[], int]
    bucket: Callable[[], str | int | None]
    ring: Callable[[], Ring]


class Phase:
    """One kind of work of a worker, timed on the host: ``with worker.forward: ...``. Reusable; nests; never swallows an exception.

    The span is named ``<role>.<phase>``. Time is host time: around asynchronous device work it is launch time.
    This class records nothing; a worker's phases are of subclasses bound to its ring.
    """

    __slots__ = ()

    def __enter__(self) -> Any:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Do nothing."""


class Step:
    """One item of work of a worker: ``with worker.step() as step: ...``. Use it in the thread that entered it, until it ends.

    This class records nothing; a worker's step is of a subclass bound to its ring.
    """

    __slots__ = ()

    def __enter__(self) -> Step:
        """Do nothing."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Do nothing."""

    def set(
        self, *, tokens: Any = None, loss_tokens: Any = None, bucket: Any = None, step: Any = None, batch_id: Any = None, **other: Any
    ) -> None:
        """Attach values to the step: int, float, str or bool. Anything else (a tensor) is not read, but refused and counted.

        Args:
            tokens: Tokens of the batch, >= 0; summed to `dflash.worker.tokens`.
            loss_tokens: Tokens that count in the loss, >= 0.
            bucket: Length bucket of the batch, str or int; also goes with the items the step puts.
            step: Your number of the step, >= 0.
            batch_id: Your name of the batch.
            other: Any other; the attribute is `dflash.<name>`.
        """

    def produced(self) -> int:
        """Return a context, an int of 24 bytes, for one item this step hands on by other ways than a wrapped queue. 0 when off."""
        return 0

    def consumed(self, context: int) -> None:
        """Say that this step works on the item of that context. The first one makes this step part of the item's trace."""

    @property
    def id(self) -> int:
        """The step's id, which its consumers' links name; 0 when nothing is captured."""
        return 0


class Worker:
    """One worker of a role. Any thread may use it between steps, one at a time. Nothing here raises while training runs.

    The usual phases are attributes: queue_get, prefetch_get (state starved), queue_put (backpressured), model_forward, pack_hidden,
    forward, backward, optimizer, h2d, d2h (busy); any other is `phase(name)`.
    """

    queue_get: Phase
    prefetch_get: Phase
    queue_put: Phase
    model_forward: Phase
    pack_hidden: Phase
    forward: Phase
    backward: Phase
    optimizer: Phase
    h2d: Phase
    d2h: Phase

    def __init__(self, role: str, index: int, gpu: int | None = None, bind: Callable[[Step], Writer | None] | None = None) -> None:
        """Make a worker; `Telemetry.worker` does. Without `bind` it records nothing."""
        self.role = role
        self.index = index
        self.gpu = gpu
        self._step = Step()
        self._writer: Writer | None = None
        if bind is not None:
            bound = type("Step", (Step,), {"__slots__": ()})
            self._step = bound()
            self._writer = writer = bind(self._step)
            if writer is not None:  # a static closure is called without making a bound method
                for name, function in (
                    ("__enter__", writer.step_enter),
                    ("__exit__", writer.step_exit),
                    ("set", writer.set_values),
                    ("produced", writer.produced),
                    ("consumed", writer.consumed),
                ):
                    setattr(bound, name, staticmethod(function))
                bound.id = property(lambda _: writer.step_id())  # type: ignore[attr-defined]
        self._phases: dict[str, tuple[str, Phase]] = {}

    def step(self) -> Step:
        """Return the context manager of the worker's next step. Steps of one worker do not nest."""
        return self._step

    def resume(self, context: int) -> Step:
        """Return the context manager of a step that goes on with another step's item: its phases join that step's span.

        For a thread that finishes work begun elsewhere, such as an asynchronous copy; `context` is what that step `produced()`.
        """
        if self._writer is not None:
            self._writer.resume(context)
        return self._step

    def phase(self, name: str, state: str | None = None) -> Phase:
        """Return the phase of that name; the same one each time.

        Args:
            name: Letters, digits, ``_`` or ``.``; one of few: it becomes a span name and a metric attribute.
            state: What the worker's time in it counts as: busy, starved, backpressured or lock_wait. Default: as the usual phase of
                that name, else busy.

        Raises:
            ConfigError: The name cannot be one, the state is unknown, or the phase exists with another state.
        """
        known = self._phases.get(name) if isinstance(name, str) else None
        if known is not None:
            if state is not None and state != known[0]:
                kept = f"phase {name!r} of {self.role} {self.index} has state {known[0]!r}"
                raise ConfigError(f"{kept}; it cannot become {state!r}: use another name")
            return known[1]
        if not isinstance(name, str) or not name.replace("_", "").replace(".", "").isalnum() or len(name) > 64:
            raise ConfigError(f"a phase name is 1 to 64 letters, digits, '_' or '.', got {name!r}; try 'pack_hidden'")
        state = state or USUAL_PHASES.get(name, State.BUSY).name.lower()
        if not isinstance(state, str) or state not in STATES:
            raise ConfigError(f"a phase's state is one of {', '.join(STATES)}, got {state!r}")
        phase = Phase()
        if self._writer is not None:
            enter, leave = self._writer.make_phase(name, state)
            phase = type("Phase", (Phase,), {"__slots__": (), "__enter__": staticmethod(enter), "__exit__": staticmethod(leave)})()
        self._phases[name] = (state, phase)
        return phase

    def __getattr__(self, name: str) -> Phase:
        """Make a usual phase at its first use."""
        if name not in USUAL_PHASES:
            usual = ", ".join(USUAL_PHASES)
            raise AttributeError(f"a worker has no {name!r}; the usual phases are {usual}; one of your own is worker.phase({name!r})")
        phase = self.phase(name)
        self.__dict__[name] = phase
        return phase

    def close(self) -> None:
        """Say that the worker is done: its memory is given back once the agent has read it. Afterwards it records nothing."""
        if self._writer is not None:
            self._writer.close()
