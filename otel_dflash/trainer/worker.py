"""What the user's threads hold: Worker, Step, Phase. The recording itself is in writer/."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TypeVar, overload

from otel_dflash.config import ConfigError
from otel_dflash.records import State
from otel_dflash.trainer.binding import bound_class, described, recorded
from otel_dflash.trainer.context import NULL, Context, ContextForm, accepting, as_int, issuing
from otel_dflash.trainer.writer.protocol import Writer

F = TypeVar("F", bound=Callable[..., Any])

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
STATES: Final = {state.name.lower(): state for state in State if state < State.OTHER}


class Phase:
    """One kind of work of a worker, timed on the host: queue_get, forward, ...

    Usage::

        with worker.forward:                # a block; worker.forward() is the same
            loss = drafter(item)

        @worker.forward                     # each call of a function
        def forward(item): ...

        worker.forward.begin()              # where no block fits: callbacks, a loop patched from outside
        worker.forward.end()                # end(error) when it failed

    Reusable. Phases nest, also in themselves, and never swallow an exception. The span is named
    `<role>.<phase>`. Time is host time: around asynchronous device work it is launch time. A phase outside a
    step counts in the worker's states too, and its span is a trace of its own.
    """

    __slots__ = ("_origin",)

    def __init__(self, origin: tuple[Any, ...] = ()) -> None:
        """Make a phase that records nothing; a worker makes its own record. `origin` is what pickle makes a
        phase of."""
        self._origin = origin

    @overload
    def __call__(self) -> Phase: ...
    @overload
    def __call__(self, function: F) -> F: ...
    def __call__(self, function: Callable[..., Any] | None = None) -> Any:
        """Return the phase itself, or a function whose every call is one.

        Raises:
            ConfigError: The argument is not a function, or its call only makes a coroutine or a generator.
        """
        return self if function is None else recorded(self, function, "a phase")

    def __enter__(self) -> Any:
        """Do what `begin` does."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do what `end` does."""

    def begin(self) -> None:
        """Begin the phase, as entering `with` does. Call `end` when it is over, in any thread.

        A phase that begins twice is nested in itself and needs two ends. A phase that is still open when its
        step ends is not recorded, and is counted as stale when it begins again.
        """

    def end(self, error: BaseException | None = None) -> None:
        """End the phase, as leaving `with` does. Without a begin, nothing happens.

        Args:
            error: The exception, if the phase failed. An empty or full queue and the end of an iterator are
                not failures.
        """

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickle as the process's own phase; a copy is the same phase."""
        return self._origin or (Phase, ())

    __repr__ = described


class Step:
    """One turn of a worker's loop, such as one batch.

    Usage::

        with worker.step() as step:         # a block; worker.step is the same
            step.set(tokens=4096)

        @worker.step                        # each call of a function
        def turn(batch): ...

        worker.step.begin()                 # where no block fits: callbacks, a loop patched from outside
        worker.step.end()                   # end(error) when it failed

    Steps of one worker do not nest. A step belongs to the thread that began it until it ends. If a step
    begins again before it has ended, it is cut off: its span ends at the last thing it recorded and is marked
    truncated, it is not a batch, and it is counted as stale.
    """

    __slots__ = ("_origin",)

    def __init__(self, origin: tuple[Any, ...] = ()) -> None:
        """Make a step that records nothing; a worker makes its own record. `origin` is what pickle makes a
        step of."""
        self._origin = origin

    @overload
    def __call__(self) -> Step: ...
    @overload
    def __call__(self, function: F) -> F: ...
    def __call__(self, function: Callable[..., Any] | None = None) -> Any:
        """Return the step itself, or a function whose every call is one.

        Raises:
            ConfigError: The argument is not a function, or its call only makes a coroutine or a generator.
        """
        return self if function is None else recorded(self, function, "a step")

    def __enter__(self) -> Step:
        """Do what `begin` does."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do what `end` does."""

    def begin(self) -> Step:
        """Begin the step, as entering `with` does, and return it. Call `end` or `cancel` in the same
        thread."""
        return self

    def end(self, error: BaseException | None = None) -> None:
        """End the step, as leaving `with` does. Without a begin, nothing happens.

        Args:
            error: The exception, if the turn failed. An empty or full queue and the end of an iterator are
                not failures.
        """

    def cancel(self) -> None:
        """Take the step back, because the turn had no work (a sentinel, StopIteration). After this no step is
        open; leaving its `with` does nothing more.

        The step leaves no span, no batch and no values. Its phases, including those still open, count in the
        worker's states as phases outside a step. Items that it consumed count as received, but no span shows
        them. A step that has already handed on an item cannot be taken back, because the consumer's span
        links to it: it ends instead.
        """

    def set(
        self,
        /,
        *,
        tokens: Any = None,
        loss_tokens: Any = None,
        bucket: Any = None,
        step: Any = None,
        batch_id: Any = None,
        **other: Any,
    ) -> None:
        """Attach values to the step: int, float, str or bool, or numpy's integers, floats and bools.

        Anything else (a tensor) is not read: it is refused, counted and named in the summary. Outside a step,
        nothing happens.

        A worker stores about 500 different strings in its lifetime, over all keys and buckets, each cut at
        128 bytes. Any further string reads `_OTHER` and is counted as `name_limit`, and the summary names its
        key. Pass what differs from step to step as a number, which has no such limit: `batch_id=17`, not
        `batch_id="shard-17"`.

        Args:
            tokens: Tokens of the batch, 0 to 2**63 - 1; summed to `dflash.worker.tokens`.
            loss_tokens: Tokens that count in the loss, 0 to 2**63 - 1.
            bucket: Length bucket of the batch, a str or an int, one of few. It travels with the items that
                the step puts after it.
            step: Your number of the step, 0 to 2**48 - 2.
            batch_id: Your name of the batch; the attribute is `dflash.batch.id`.
            other: Any other; the attribute is `dflash.<name>`. Ints from -(2**63 - 1) to 2**63 - 1.
        """

    def produced(self) -> Context:
        """Return the context of one item that this step hands on by other ways than a wrapped queue.

        Each form says the same; send the one that fits:

        * `context.words`, three signed 64-bit ints: an int64 tensor, `struct.pack("3q", *words)`, a repeated
          int64 field, JSON, msgpack.
        * `context.text`, 48 hex digits: an HTTP header, gRPC metadata, an environment variable.
        * `context`, an int of 192 bits, too large for an int64: a Python object, a pickle.
        * `context.to_bytes(24, "big")`: raw bytes.

        While nothing is captured (telemetry off, capture off, outside a step) it is a null context of the
        same width, which `consumed` and `resume` ignore.
        """
        return NULL

    def consumed(self, context: ContextForm) -> None:
        """Record that this step works on the item of that context. The first one makes this step part of the
        item's trace.

        Args:
            context: What `produced` returned, in any of its forms; words as a tuple or a list. Anything else
                (a tensor) is not read, but refused and counted.
        """

    @property
    def id(self) -> int:
        """The step's id, which its consumers' links name; 0 when nothing is captured."""
        return 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickle as the process's own step; a copy is the same step."""
        return self._origin or (Step, ())

    __repr__ = described


class Worker:
    """One worker of a role: what the loop of one thread records with. `Telemetry.worker` makes it.

    Usage::

        worker = telemetry.worker("drafter", 0, gpu=5)
        while True:
            with worker.queue_get:          # a wait outside the step is recorded too, and counts as starved
                item = items.get()
            if item is None:
                break
            with worker.step() as step:
                step.set(tokens=item.tokens)
                with worker.forward: ...
                with worker.phase("clip_grad", state="busy"): ...
        worker.close()

    `with worker.forward:`, `with worker.forward():`, `@worker.forward` on a function, and `begin()` and
    `end()` all record the same; `worker.step` can be used in the same ways. `step.cancel()` takes back a step
    that turned out to have no work.

    The usual phases are attributes: queue_get, prefetch_get (state starved), queue_put (backpressured),
    model_forward, pack_hidden, forward, backward, optimizer, h2d, d2h (busy); any other is `phase(name)`.
    Time in no phase counts as other.

    Any thread may use a worker between steps, one at a time. Recording never raises. What does is a mistake
    in the program: a wrong phase, a decorator on what is not a plain function, a wrong argument.

    A copy of a worker is the same worker. Unpickled in another process (a spawned one), it is that process's
    own worker of the same role, index and gpu, which records once `start()` is called there.
    """

    step: Step
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

    def __init__(
        self,
        role: str,
        index: int,
        gpu: int | None = None,
        bind: Callable[[Step], Writer | None] | None = None,
        find: Callable[[str, int, int | None], Worker] | None = None,
    ) -> None:
        """Make a worker; `Telemetry.worker` does. Without `bind` it records nothing; `find` is what pickle
        makes a worker with."""
        self.role = role
        self.index = index
        self.gpu = gpu
        self.step = Step((getattr, (self, "step")))
        self._find = find or Worker
        self._writer: Writer | None = None
        self._closed = False
        self._phases: dict[str, tuple[str, Phase]] = {}
        if bind is not None:
            self._record(bind)

    def _record(self, bind: Callable[[Step], Writer | None]) -> None:
        """Record from here on, also with the step and phases that are handed out; `Telemetry` calls it."""
        if self._closed or self._writer is not None or (writer := bind(self.step)) is None:
            return
        self._writer = writer
        closures = {
            "begin": writer.step_enter,
            "end": writer.step_exit,
            "cancel": writer.step_cancel,
            "set": writer.set_values,
            "produced": issuing(writer.produced),
            "consumed": accepting(writer.consumed),
        }
        bound = bound_class(self.step, closures)
        bound.id = property(lambda _: writer.step_id(), doc=Step.id.__doc__)
        self.step.__class__ = bound
        for name, (state, phase) in list(self._phases.items()):
            self._record_phase(writer, name, state, phase)

    def resume(self, context: ContextForm) -> Step:
        """Return the context manager of a step that goes on with another step's item: its phases join that
        step's span.

        For a thread that finishes work begun elsewhere, such as an asynchronous copy; `context` is what that
        step `produced()`, in any of its forms.
        """
        if self._writer is not None:
            self._writer.resume(as_int(context))
        return self.step

    def phase(self, name: str, state: str | None = None) -> Phase:
        """Return the phase of that name; the same one each time.

        Args:
            name: Letters, digits, ``_`` or ``.``; one of few: it becomes a span name and a metric attribute.
            state: What the worker's time in it counts as: busy, starved, backpressured or lock_wait. Default:
                as the usual phase of that name, else busy.

        Raises:
            ConfigError: The name cannot be one, the state is unknown, or the phase exists with another state.
        """
        if state is not None and (not isinstance(state, str) or state not in STATES):
            raise ConfigError(f"a phase's state is one of {', '.join(STATES)}, got {state!r}")
        known = self._phases.get(name) if isinstance(name, str) else None
        if known is not None:
            if state is not None and state != known[0]:
                kept = f"phase {name!r} of {self.role} {self.index} has state {known[0]!r}"
                raise ConfigError(f"{kept}; it cannot become {state!r}: use another name")
            return known[1]
        if (
            not isinstance(name, str)
            or not name.replace("_", "").replace(".", "").isalnum()
            or len(name) > 64
        ):
            raise ConfigError(
                f"a phase name is 1 to 64 letters, digits, '_' or '.', got {name!r}; try 'pack_hidden'"
            )
        state = state or USUAL_PHASES.get(name, State.BUSY).name.lower()
        phase = Phase((self.phase, (name, state)))
        if self._writer is not None:
            self._record_phase(self._writer, name, state, phase)
        self._phases[name] = (state, phase)
        return phase

    @staticmethod
    def _record_phase(writer: Writer, name: str, state: str, phase: Phase) -> None:
        enter, leave = writer.make_phase(name, state)
        phase.__class__ = bound_class(phase, {"begin": enter, "end": leave})

    def __getattr__(self, name: str) -> Phase:
        """Make a usual phase at its first use."""
        if name not in USUAL_PHASES:
            usual = ", ".join(USUAL_PHASES)
            raise AttributeError(
                f"a worker has no {name!r}; the usual phases are {usual}; one of your own is "
                f"worker.phase({name!r})"
            )
        phase = self.phase(name)
        self.__dict__[name] = phase
        return phase

    def close(self) -> None:
        """End the worker: it records nothing more, and its memory is released once the agent has read it."""
        self._closed = True
        if self._writer is not None:
            self._writer.close()

    def __copy__(self) -> Worker:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Worker:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickle as the process's own worker of the role, index and gpu."""
        return self._find, (self.role, self.index, self.gpu)

    __repr__ = described
