"""start() and Telemetry: what a training process opens once. Everything after that happens in memory."""

from __future__ import annotations

import atexit
import itertools
import mmap
import os
import sys
import threading
import time
import weakref
from _thread import get_ident
from pathlib import Path
from typing import Any, Final, TypeVar

from otel_dflash import config
from otel_dflash.config import ConfigError
from otel_dflash.console import report
from otel_dflash.launch import AGENT_LOG, start_supervisor
from otel_dflash.records import RECORD_BYTES, SLOTS_OFFSET, Counter, Header
from otel_dflash.ring import Ring, create_ring
from otel_dflash.session import (
    AGENT_START_S,
    LOCK_FILE,
    SUPERVISOR_LOCK_FILE,
    Session,
    create_or_join,
    is_held,
    map_control,
    open_session,
    register_process,
    remove_directory,
    remove_session,
)
from otel_dflash.trainer.contexts import Contexts
from otel_dflash.trainer.queues import describe_queue, hook
from otel_dflash.trainer.unrecorded import count_steps
from otel_dflash.trainer.values import unboxed
from otel_dflash.trainer.worker import Step, Worker
from otel_dflash.trainer.writer.protocol import OpenStep, Writer
from otel_dflash.trainer.writer.python import bind

Q = TypeVar("Q")
ATTACH_TIMEOUT_S: Final = 2.0
CALIBRATION_PHASES: Final = 400
CALIBRATION_BURSTS: Final = 4

# next() is atomic; a forked child continues counting under its own pid. A program started by exec() has the
# pid and start time of the one that it replaced, so it must not count from the same number.
_ring_numbers = itertools.count(time.monotonic_ns())
# replaced in a forked child, where it may be held by a thread that does not exist
_starting = threading.Lock()


class Telemetry:
    """The telemetry of this process. `start()` returns one that records.

    Every call of a bare `Telemetry()` is a cheap no-op.

    A copy of it is the same telemetry. Unpickled in another process (a spawned one), it is that process's
    own, which records once `start()` is called there.
    """

    def __init__(self, session: Session | None = None) -> None:
        """Open this process's side of a session, if there is one."""
        self._session: Session | None = None
        self._is_started = False
        self._current: dict[int, OpenStep | None] = {}
        self._pending: dict[int, list[Any]] = {}
        self._writers: weakref.WeakValueDictionary[int, Writer] = weakref.WeakValueDictionary()  # by id
        self._workers: weakref.WeakValueDictionary[tuple[str, int, int | None], Worker] = (
            weakref.WeakValueDictionary()  # the newest of each role, index and gpu
        )
        self._registered_pid = 0
        self._warned = False
        if session is not None:
            self._join(session)

    def _join(self, session: Session) -> None:
        """Record into a session from now on, including workers unpickled before."""
        self._control = map_control(session)
        self._wall_offset_ns = session.anchor_wall_ns - session.anchor_mono_ns
        self._ring_bytes = config.ring_bytes()
        self._phase_cost_ps = _phase_cost_ps()
        self._register(session)
        self._session = session
        for reference in self._workers.valuerefs():
            if (worker := reference()) is not None:
                self._record(worker)

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return self._session is not None

    @property
    def run_id(self) -> str:
        """The run's id, "" if nothing is recorded."""
        return self._session.run_id if self._session else ""

    def worker(self, role: str, index: int, gpu: int | None = None) -> Worker:
        """Return a worker with a ring of its own. Call it once per worker, from any thread.

        Args:
            role: "target", "drafter", "prefetch", "postprocess", or a name of your own: letters, digits and
                ``_``.
            index: Which of its role, >= 0.
            gpu: Device index the worker drives, if any.

        Raises:
            ConfigError: An argument is invalid.
        """
        if not isinstance(role, str) or not role.replace("_", "").isalnum() or len(role) > 64:
            raise ConfigError(f"a role is 1 to 64 letters, digits or '_', got {role!r}; try 'drafter'")
        index, gpu = unboxed(index), unboxed(gpu)
        for name, value in (("index", index), ("gpu", 0 if gpu is None else gpu)):
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} of a worker must be an int >= 0, got {value!r}")
        worker = self._workers[role, index, gpu] = Worker(role, index, gpu, find=self._find)
        if self._session is not None:
            self._record(worker)
        return worker

    def wrap_queue(
        self,
        queue: Q,
        name: str,
        *,
        capacity: int | None = None,
        min_ready: int | None = None,
        put: str = "put",
        get: str = "get",
    ) -> Q:
        """Let contexts travel beside the items of a queue; return the queue to use (the same object, except
        for a `SimpleQueue`).

        Where steps of several workers are open in one thread (asyncio), a put belongs to the one that is in a
        backpressured phase such as `queue_put`, and a get to the one that is in a starved phase such as
        `queue_get`.

        Args:
            queue: A `queue.Queue`, `LifoQueue`, `PriorityQueue` or subclass, a `SimpleQueue`, or any object
                with a put and a get method in this process. Items are never wrapped or kept alive.
            name: The queue's name in telemetry, such as "hidden_states".
            capacity: Items it may hold, if bounded.
            min_ready: Items that the queue must hold before it hands any out, if it waits for some, as a
                queue does that mixes its items.
            put: Name of the method that takes an item as its first argument.
            get: Name of the method that returns an item, or a list of items. Of a `queue.Queue` subclass
                whose own `put` or `get` calls the inherited one, name put="_put", get="_get": then items
                that it splits or transforms are followed too.

        Raises:
            ConfigError: The queue lacks the methods, is wrapped already, or is a class, or an argument is
                invalid.
        """
        text = describe_queue(name, unboxed(capacity), unboxed(min_ready))
        contexts = None
        if self._session is not None:
            contexts = Contexts(text, self._wall_offset_ns, self._current, self._pending, self._count)
        wrapped: Q = hook(queue, contexts, put, get)
        return wrapped

    def close(self) -> None:
        """End this process's part of the run; called at exit. Workers record nothing afterwards. May be
        called twice."""
        if self._session is None:
            return
        writers = self._living_writers()
        deadline = time.monotonic() + ATTACH_TIMEOUT_S
        for writer in writers:
            while writer.ring().must_wait_for_reader and time.monotonic() < deadline:
                time.sleep(0.01)
        for writer in writers:
            writer.close()

    def _find(self, role: str, index: int, gpu: int | None) -> Worker:
        """Return this process's worker for a pickled one."""
        return self._workers.get((role, index, gpu)) or self.worker(role, index, gpu)

    def _record(self, worker: Worker) -> None:
        role, index, gpu = worker.role, worker.index, worker.gpu
        worker._record(lambda step: self._bind(role, index, gpu, step))
        if worker._writer is None:
            count_steps(worker, self._control)

    def _bind(self, role: str, index: int, gpu: int | None, step: Step) -> Writer | None:
        def make_ring() -> Ring:
            return self._make_ring(role, index, gpu)

        try:
            writer = bind(make_ring, self._control, self._wall_offset_ns, step, self._current, self._pending)
        except OSError:
            return None
        self._writers[id(writer)] = writer
        return writer

    def _make_ring(self, role: str, index: int, gpu: int | None) -> Ring:
        assert self._session
        try:
            self._register(self._session)
            place = f"{self._session.run_id} {self._session.node}"
            ring = create_ring(
                self._session.path, next(_ring_numbers), self._ring_bytes, role, index, gpu, place
            )
        except OSError as error:
            self._warn(f"worker {role} {index} records nothing: no ring can be created ({error})")
            raise
        ring.words[Header.RECORD_COST] = self._phase_cost_ps
        return ring

    def _register(self, session: Session) -> None:
        if self._registered_pid != os.getpid():
            register_process(session)
            self._registered_pid = os.getpid()
            multiprocessing_util = sys.modules.get("multiprocessing.util")
            if multiprocessing_util is not None:  # its forked children leave by os._exit, without atexit
                multiprocessing_util.Finalize(None, self.close, exitpriority=0)

    def _count(self, counter: Counter, amount: int) -> None:
        """Count events without a worker at this thread's worker, else at any that is not closed."""
        current = self._current.get(get_ident())
        writers = [*([current] if current else []), *self._living_writers()]
        ring = next((ring for writer in writers if (ring := writer.ring()).is_open), None)
        if ring is not None:
            ring.count(counter, amount)

    def _living_writers(self) -> list[Writer]:
        return [writer for reference in self._writers.valuerefs() if (writer := reference()) is not None]

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            report(f"{text}; training goes on")

    def _after_fork(self) -> None:
        """Detach from the parent's rings in a forked child. A worker gets its own when the child uses it."""
        self._current.clear()
        self._pending.clear()
        for writer in self._living_writers():
            writer.orphan()

    def __repr__(self) -> str:
        return f"<Telemetry {self.run_id}, on>" if self.enabled else "<Telemetry, off>"

    def __copy__(self) -> Telemetry:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Telemetry:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickle as the process's own; nothing is started."""
        return _own_telemetry, ()


_own = Telemetry()  # this process's; start() opens it


def _own_telemetry() -> Telemetry:
    return _own


def start(run_id: str | None = None) -> Telemetry:
    """Start telemetry in this process, once; a second call returns the same.

    Joins the session of `otel-dflash run`, of the process that started this one, or of another rank that a
    launcher started on this node; else creates a session and starts its agent. If no session can be joined or
    created, a setting is invalid (one line reports which), or OTEL_DFLASH_DISABLED or OTEL_SDK_DISABLED is
    true, the returned telemetry records nothing; training continues.

    Args:
        run_id: Name of the run, where this process creates the session: letters, digits, ``._-``. Default:
            OTEL_DFLASH_RUN_ID, else made from the time.

    Raises:
        ConfigError: `run_id` is not a valid run id.
    """
    if run_id is not None:
        config.run_id(run_id)
    with _starting:
        if not _own._is_started:
            _own._is_started = True
            if config.disabled_by() is None:
                _open(_own, run_id)
        return _own


def _renew_lock() -> None:
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _open(telemetry: Telemetry, run_id: str | None) -> None:
    try:
        config.ring_bytes()
        telemetry._join(_join_or_create(run_id))
    except (ConfigError, OSError) as error:
        report(f"telemetry is off: {error}; training goes on")
        return
    atexit.register(telemetry.close)
    os.register_at_fork(after_in_child=telemetry._after_fork)


def _join_or_create(run_id: str | None) -> Session:
    inherited = os.environ.get(config.SESSION_VARIABLE)
    if inherited:
        return open_session(Path(inherited))
    config.AgentConfig.from_environment()  # else the agent would end at once, reported only in its log
    session, is_new = create_or_join(run_id)
    if is_new:
        _serve(session)
    os.environ[config.SESSION_VARIABLE] = str(session.path)  # for the processes this one starts
    return session


def _serve(session: Session) -> None:
    """Start an agent for a session that this process created; if that fails, remove session and recording."""
    try:
        membership = register_process(session)  # before the agent checks for living processes
        start_supervisor(session, os.environ)
    except (ConfigError, OSError):
        remove_session(session)
        remove_directory(session.recording)
        raise
    atexit.register(_report_missing_agent, session, os.getpid(), time.monotonic())
    if os.getpid() == 1:
        exit_timeout_s = config.AgentConfig.from_environment().exit_timeout_s
        atexit.register(_await_agent, session, membership, exit_timeout_s + config.AGENT_GRACE_S)


def _await_agent(session: Session, membership: Path, timeout_s: float) -> None:
    """Wait for the agent at exit: the kernel kills it with process 1 of a container."""
    if os.getpid() != 1:
        return
    membership.unlink(missing_ok=True)
    deadline = time.monotonic() + timeout_s
    while session.path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _report_missing_agent(session: Session, pid: int, since_s: float) -> None:
    """Report at exit that nobody serves the session; its supervisor reports that itself."""
    if os.getpid() != pid or time.monotonic() - since_s < AGENT_START_S or not session.path.exists():
        return
    if any(is_held(session.path / lock) for lock in (LOCK_FILE, SUPERVISOR_LOCK_FILE)):
        return
    from otel_dflash.session_list import dropped_records

    dropped = sum(dropped_records(session).values())
    lost = f"{dropped:,} records were dropped, the others" if dropped else "its records"
    report(
        f"no agent is serving this run (see {session.recording / AGENT_LOG}): {lost} stay in memory until "
        "the next `otel-dflash` command takes them"
    )


def _phase_cost_ps() -> int:
    """Return the cost of one phase in this process, in ps: the fastest of a few bursts on unread memory."""
    memory = mmap.mmap(-1, SLOTS_OFFSET + (CALIBRATION_PHASES + 1) * RECORD_BYTES)
    ring = Ring(memory, 0, "calibration", 0, None, "")
    worker = Worker(
        "calibration",
        0,
        None,
        lambda step: bind(lambda: ring, memoryview(bytes(8)).cast("Q"), 0, step, {}, {}),
    )
    bursts = []
    with worker.step():
        phase = worker.forward
        for _ in range(CALIBRATION_BURSTS):
            t0 = time.monotonic_ns()
            for _ in range(CALIBRATION_PHASES // CALIBRATION_BURSTS):
                with phase:
                    pass
            bursts.append(time.monotonic_ns() - t0)
    return min(bursts) * 1000 * CALIBRATION_BURSTS // CALIBRATION_PHASES
