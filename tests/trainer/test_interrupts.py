"""KeyboardInterrupt at every point of a step where the interpreter can raise one: afterwards the worker works
as new."""

from __future__ import annotations

import dis
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import otel_dflash
from tests.trainer.ring_reader import MemoryWorker

pytestmark = pytest.mark.timeout(60, method="thread")  # the alarm is used by the tests themselves
OURS = str(Path(otel_dflash.__file__).parent)
# what the interpreter may look for signals at, or more than that
LOOKS_FOR_SIGNALS = (
    "CALL",
    "RESUME",
    "JUMP",
)


@pytest.fixture(autouse=True)
def no_destructors() -> Iterator[None]:
    """Python drops an interrupt in a destructor, such as that of another test's ring."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def keyboard_interrupt() -> None:
    raise KeyboardInterrupt


class Interrupt:
    """Acts in our code, as a signal handler does, at the n-th point where one can come: after a call, a jump,
    or a function's entry."""

    def __init__(self, at: int, action: Callable[[], None] = keyboard_interrupt) -> None:
        self.at = at
        self.action = action
        self.points = 0
        self.operations: dict[CodeType, dict[int, str]] = {}

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        if code not in self.operations:
            self.operations[code] = {
                instruction.offset: instruction.opname for instruction in dis.get_instructions(code)
            }
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self.local("RESUME")

    def local(self, before: str) -> Callable[..., Any]:
        def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
            nonlocal before
            if event == "opcode":
                if before.startswith(LOOKS_FOR_SIGNALS) or "JUMP" in before:
                    self.points += 1
                    if self.points == self.at:
                        self.action()
                before = self.operations[frame.f_code].get(frame.f_lasti, "")
            return trace

        return trace


def one_step(worker: otel_dflash.Worker) -> None:
    with worker.step() as step:
        with worker.forward, worker.forward:
            step.set(tokens=1, bucket="x", a=2)
        with suppress(ValueError), worker.backward:
            raise ValueError


def cancelled_step(worker: otel_dflash.Worker) -> None:
    with worker.step() as step, worker.forward:
        step.cancel()
        with worker.backward:
            pass


def only_phases(worker: otel_dflash.Worker) -> None:
    with worker.forward, worker.backward:
        pass


def interrupted(work: Callable[[otel_dflash.Worker], None], at: int, slots: int) -> tuple[MemoryWorker, bool]:
    """Do the work with an interrupt at that point; return whether there is such a point."""
    memory = MemoryWorker(slots)
    one_step(memory.worker)
    memory.take()
    interrupt = Interrupt(at)
    sys.settrace(interrupt.trace)
    try:
        work(memory.worker)
    except KeyboardInterrupt:
        return memory, True
    finally:
        sys.settrace(None)
    return memory, False


@pytest.mark.parametrize("slots", [64, 3])
@pytest.mark.parametrize("work", [one_step, cancelled_step, only_phases])
def test_after_an_interrupt_anywhere_the_next_step_starts_clean(
    work: Callable[[otel_dflash.Worker], None], slots: int
) -> None:
    interrupted(work, 0, slots)  # Python 3.12 traces operations from the second time on
    points = 0
    for at in range(1, 1000):
        memory, there_is = interrupted(work, at, slots)
        memory.take()
        memory.reader.assert_no_hole()
        steps = memory.counters()["steps"]
        with memory.worker.step() as step:
            with memory.worker.forward:
                pass
            serial = step.id - memory.ring.id
        assert [record[:4] for record in memory.take()][:1] == [("PHASE", "busy forward", "", serial)], at
        with memory.worker.step(), memory.worker.forward:
            pass
        assert [(record.kind, record.step) for record in memory.take()] == [
            ("PHASE", serial + 1),
            ("STEP", serial + 1),
        ], at
        assert memory.current == {threading.get_ident(): None}, at
        counters = memory.counters()
        assert counters["steps"] == steps + 2, at
        assert counters.keys() <= {"steps", "tokens", "ring_full", "stale"}, at
        if not there_is:
            break
        points += 1
    assert points > 20
    assert not there_is


@pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="3.10 writes cells back after a trace function: what the handler did is undone",
)
def test_a_phase_of_a_handler_that_comes_anywhere_is_recorded() -> None:
    """Also between the claim of a step and its first phase: what is neither recorded nor counted is lost in
    silence."""
    for at in range(1000):  # 0: no handler comes; Python 3.12 traces operations from the second time on
        memory = MemoryWorker(64)
        handler = memory.worker.phase("handler")
        one_step(memory.worker)
        memory.take()

        def handle(handler: otel_dflash.Phase = handler) -> None:
            with handler:
                pass

        interrupt = Interrupt(at, handle)
        sys.settrace(interrupt.trace)
        try:
            one_step(memory.worker)
        finally:
            sys.settrace(None)
        names = [record.name for record in memory.take()]
        memory.reader.assert_no_hole()
        came = 0 < at <= interrupt.points
        assert (names.count("busy handler"), len(names)) == (came, 5 + came), at
        assert memory.counters().keys() <= {"steps", "tokens"}, at
        if at > interrupt.points:
            break
    assert at > 20


def test_interrupts_at_random_leave_no_hole() -> None:
    memory = MemoryWorker()
    raised = 0
    armed = False

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    # a function: on 3.13 the jump that ends a loop is not covered by a `try` around it
    def until_interrupted() -> None:
        nonlocal armed
        armed = True
        while armed:
            one_step(memory.worker)
            memory.take()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1.3e-4)
        while raised < 1000:
            try:
                until_interrupted()
            except KeyboardInterrupt:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    memory.take()
    memory.reader.assert_no_hole()
    with memory.worker.step(), memory.worker.forward:
        pass
    assert [record.kind for record in memory.take()] == ["PHASE", "STEP"]
    assert memory.current == {threading.get_ident(): None}
    assert memory.counters().keys() <= {"steps", "tokens", "ring_full", "stale"}
