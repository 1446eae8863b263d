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
from otel_dflash.records import RECORD_BYTES, SLOTS_OFFSET, Counter, Header
from otel_dflash.ring import Ring, create_ring
from otel_dflash.session import (
    LOCK_FILE,
    Session,
    create_or_join,
    map_control,
    open_session,
    register_process,
    remove_directory,
    remove_session,
)
from otel_dflash.trainer.contexts import Contexts
from otel_dflash.trainer.launch import AGENT_LOG, start_agent
from otel_dflash.trainer.queues import describe_queue, hook
from otel_dflash.trainer.worker import Step, Worker, Writer
from otel_dflash.trainer.writer import bind

Q = TypeVar("Q")
ATTACH_TIMEOUT_S: Final = 2.0
AGENT_START_S: Final = 5.0  # by then an agent has its lock, if it ever will
CALIBRATION_PHASES: Final = 400
CALIBRATION_BURSTS: Final = 4

# next() is atomic; a forked child goes on counting, under its own pid. A program that exec() put in place of another has its pid and
# start time too, so it must not count from the same number.
_ring_numbers = itertools.count(time.monotonic_ns())
_starting = threading.Lock()  # a new one in a forked child: there it may have been held by a thread that is not there
_started: Telemetry | None = None


class Telemetry:
    """The telemetry of this process. `start()` makes one that records; `Telemetry()` is one whose every call is a cheap no-op."""

    def __init__(self, session: Session | None = None) -> None:
        """Open this process's side of a session."""
        self._session = session
        self._current: dict[int, Writer | None] = {}
        self._pending: dict[int, list[Any]] = {}
        self._writers: weakref.WeakValueDictionary[int, Writer] = weakref.WeakValueDictionary()  # by id
        self._registered_pid = 0
        self._warned = False
        if session is not None:
            self._control = map_control(session)
            self._wall_offset_ns = session.anchor_wall_ns - session.anchor_mono_ns
            self._ring_bytes = config.ring_bytes()
            self._phase_cost_ps = _phase_cost_ps()
            self._register()

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return self._session is not None

    @property
    def run_id(self) -> str:
        """The run's id, "" when nothing is recorded."""
        return self._session.run_id if self._session else ""

    def worker(self, role: str, index: int, gpu: int | None = None) -> Worker:
        """Return a worker with a ring of its own. Call it once per worker, from any thread.

        Args:
            role: "target", "drafter", "prefetch", "postprocess", or a name of your own: letters, digits and ``_``.
            index: Which of its role, >= 0.
            gpu: Device index the worker drives, if any.

        Raises:
            ConfigError: An argument cannot work.
        """
        if not isinstance(role, str) or not role.replace("_", "").isalnum() or len(role) > 64:
            raise ConfigError(f"a role is 1 to 64 letters, digits or '_', got {role!r}; try 'drafter'")
        for name, value in (("index", index), ("gpu", 0 if gpu is None else gpu)):
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} of a worker must be an int >= 0, got {value!r}")
        if self._session is None:
            return Worker(role, index, gpu)
        return Worker(role, index, gpu, lambda step: self._bind(role, index, gpu, step))

    def wrap_queue(
        self, queue: Q, name: str, *, capacity: int | None = None, min_ready: int | None = None, put: str = "put", get: str = "get"
    ) -> Q:
        """Let contexts travel beside the items of a queue; use what is returned (the queue itself, but for a `SimpleQueue`).

        Args:
            queue: A `queue.Queue`, `LifoQueue`, `PriorityQueue` or subclass, a `SimpleQueue`, or any object with a put and a get method
                in this process. Items are never wrapped or kept alive.
            name: The queue's name in telemetry, such as "hidden_states".
            capacity: Items it may hold, if bounded.
            min_ready: Items below which consumers wait, if any.
            put: Name of the method that takes an item as its first argument.
            get: Name of the method that returns an item, or a list of items.

        Raises:
            ConfigError: It has no such methods, is wrapped already, or an argument cannot work.
        """
        text = describe_queue(name, capacity, min_ready)
        if self._session is None:
            return queue
        wrapped: Q = hook(queue, Contexts(text, self._wall_offset_ns, self._current, self._pending, self._lost), put, get)
        return wrapped

    def close(self) -> None:
        """End this process's part of the run; called at exit. Workers record nothing afterwards. May be called twice."""
        if self._session is None:
            return
        writers = self._living_writers()
        deadline = time.monotonic() + ATTACH_TIMEOUT_S
        for writer in writers:
            while writer.ring().must_wait_for_reader and time.monotonic() < deadline:
                time.sleep(0.01)
        for writer in writers:
            writer.close()

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
            self._register()
            place = f"{self._session.run_id} {self._session.node}"
            ring = create_ring(self._session.path, next(_ring_numbers), self._ring_bytes, role, index, gpu, place)
        except OSError as error:
            self._warn(f"worker {role} {index} records nothing: it cannot have a ring ({error})")
            raise
        ring.words[Header.RECORD_COST] = self._phase_cost_ps
        return ring

    def _register(self) -> None:
        assert self._session
        if self._registered_pid != os.getpid():
            register_process(self._session)
            self._registered_pid = os.getpid()
            multiprocessing_util = sys.modules.get("multiprocessing.util")
            if multiprocessing_util is not None:  # its forked children leave by os._exit, without atexit
                multiprocessing_util.Finalize(None, self.close, exitpriority=0)

    def _lost(self, counter: Counter) -> None:
        """Count what belongs to no worker at the one of this thread, else at any."""
        writer = self._current.get(get_ident()) or next(iter(self._living_writers()), None)
        if writer is not None:
            writer.ring().count(counter)

    def _living_writers(self) -> list[Writer]:
        return [writer for reference in self._writers.valuerefs() if (writer := reference()) is not None]

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _say(f"{text}; training goes on")

    def _after_fork(self) -> None:
        """In a forked child: the rings are the parent's. A worker gets one of its own when the child uses it."""
        self._current.clear()
        self._pending.clear()
        for writer in self._living_writers():
            writer.orphan()


def start(run_id: str | None = None) -> Telemetry:
    """Start telemetry in this process, once; a second call returns the same.

    Joins the session of `otel-dflash run`, of the process that started this one, or of another rank that a launcher started on this
    node; else creates a session and starts its agent. When that cannot be had, a setting cannot work (one line says which), or
    OTEL_DFLASH_DISABLED or OTEL_SDK_DISABLED is true, what is returned records nothing; training goes on.

    Args:
        run_id: Name of the run, where this process creates the session: letters, digits, ``._-``. Default: OTEL_DFLASH_RUN_ID, else
            made from the time.

    Raises:
        ConfigError: `run_id` cannot be one.
    """
    global _started
    if run_id is not None:
        config.run_id(run_id)
    with _starting:
        if _started is None:
            _started = Telemetry() if config.is_disabled() else _open(run_id)
        return _started


def _renew_lock() -> None:
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _open(run_id: str | None) -> Telemetry:
    try:
        config.ring_bytes()
        telemetry = Telemetry(_join_or_create(run_id))
    except (ConfigError, OSError) as error:
        _say(f"telemetry is off: {error}; training goes on")
        return Telemetry()
    atexit.register(telemetry.close)
    os.register_at_fork(after_in_child=telemetry._after_fork)
    return telemetry


def _join_or_create(run_id: str | None) -> Session:
    inherited = os.environ.get(config.SESSION_VARIABLE)
    if inherited:
        return open_session(Path(inherited))
    config.AgentConfig.from_environment()  # the agent would end at once, and say so in its log only
    session, is_new = create_or_join(run_id)
    if is_new:
        _serve(session)
    os.environ[config.SESSION_VARIABLE] = str(session.path)  # for the processes this one starts
    return session


def _serve(session: Session) -> None:
    """Have an agent serve a session that this process made; without one the session and its recording go."""
    try:
        register_process(session)  # before the agent looks for someone to serve
        start_agent(session, dict(os.environ))
    except (ConfigError, OSError):
        remove_session(session)
        remove_directory(session.recording)
        raise
    atexit.register(_say_if_no_agent, session, os.getpid(), time.monotonic())


def _say_if_no_agent(session: Session, pid: int, since_s: float) -> None:
    """At exit: an agent that was started and ended at once could tell nobody but its log."""
    is_due = os.getpid() == pid and time.monotonic() - since_s > AGENT_START_S
    if is_due and session.path.exists() and not (session.path / LOCK_FILE).exists():
        log = session.recording / AGENT_LOG
        _say(f"no agent came to take the records (see {log}); they stay in memory until the next `otel-dflash` command takes them")


def _say(text: str) -> None:
    """Print one line to stderr, if that leads anywhere: it may be closed, full, a user's object, or None, which print takes for stdout."""
    if sys.stderr is not None:
        try:
            print(f"otel_dflash: {text}", file=sys.stderr)
        except Exception:  # noqa: BLE001  nothing may raise into training
            return


def _phase_cost_ps() -> int:
    """Return what one phase costs in this process, in ps: the quickest of a few bursts on memory that nobody reads."""
    memory = mmap.mmap(-1, SLOTS_OFFSET + (CALIBRATION_PHASES + 1) * RECORD_BYTES)
    ring = Ring(memory, 0, "calibration", 0, None, "")
    worker = Worker("calibration", 0, None, lambda step: bind(lambda: ring, memoryview(bytes(8)).cast("Q"), 0, step, {}, {}))
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
