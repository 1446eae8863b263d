"""Steps and phases of a worker: what is recorded, what is counted instead, and that the user's exceptions
pass through."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

import otel_dflash
from otel_dflash import ConfigError
from otel_dflash.trainer.context import NULL
from tests.trainer.ring_reader import MemoryWorker

STEP = ("STEP", "", "")


@pytest.fixture
def memory() -> MemoryWorker:
    return MemoryWorker(slots=1024)


def in_thread(action: Callable[[], Any]) -> None:
    """Run it in another thread to its end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  handed to the test
            errors.append(error)

    thread = threading.Thread(target=run, name='the "other"\n')
    thread.start()
    thread.join()
    assert errors == []


def test_phases_nest_and_are_recorded_as_they_end(memory: MemoryWorker) -> None:
    worker = memory.worker
    with worker.step(), worker.queue_put, worker.phase("inner", state="lock_wait"), worker.phase("encode.a"):
        pass
    assert memory.shapes() == [
        ("PHASE", "busy encode.a", "", 1),
        ("PHASE", "lock_wait inner", "", 1),
        ("PHASE", "backpressured queue_put", "", 1),
        (*STEP, 1),
    ]


def test_times_lie_within_each_other(memory: MemoryWorker) -> None:
    worker = memory.worker
    with worker.step(), worker.forward, worker.backward:
        pass
    inner, outer, step = (record.words for record in memory.take())
    assert 0 < step[1] <= outer[1] <= inner[1] <= inner[2] <= outer[2] <= step[2]


def test_a_phase_nests_in_itself(memory: MemoryWorker) -> None:
    worker = memory.worker
    with worker.step(), worker.forward, worker.forward, worker.forward:
        pass
    *phases, _ = [record.words[1:3] for record in memory.take()]
    assert [phase[0] for phase in phases] == sorted((phase[0] for phase in phases), reverse=True)
    assert [phase[1] for phase in phases] == sorted(phase[1] for phase in phases)
    assert memory.counters() == {"steps": 1}


def test_phases_outside_a_step_belong_to_none(memory: MemoryWorker) -> None:
    worker = memory.worker
    with worker.forward, worker.forward, worker.backward:
        pass
    assert memory.shapes() == [
        ("PHASE", "busy backward", "", 0),
        ("PHASE", "busy forward", "", 0),
        ("PHASE", "busy forward", "", 0),
    ]
    assert memory.counters() == {}


def test_steps_of_two_workers_interleave_in_one_thread() -> None:
    current: dict[int, Any] = {}
    first, second = MemoryWorker(index=0, current=current), MemoryWorker(index=1, current=current)
    with first.worker.step(), first.worker.forward:
        with second.worker.step(), second.worker.forward, first.worker.backward:
            pass
        assert current == {threading.get_ident(): first.worker._writer}
    assert first.shapes() == [("PHASE", "busy backward", "", 1), ("PHASE", "busy forward", "", 1), (*STEP, 1)]
    assert second.shapes() == [("PHASE", "busy forward", "", 1), (*STEP, 1)]
    assert current == {threading.get_ident(): None}


def test_another_thread_may_use_a_worker_between_steps(memory: MemoryWorker) -> None:
    worker = memory.worker

    def other() -> None:
        with worker.backward:
            pass
        with worker.step() as step, worker.forward:
            step.set(tokens=2)

    with worker.step(), worker.forward:
        pass
    in_thread(other)
    with worker.step(), worker.forward:
        pass
    records = memory.take()
    assert [(record.kind, record.step) for record in records if record.kind == "STEP"] == [
        ("STEP", 1),
        ("STEP", 2),
        ("STEP", 3),
    ]
    names = [record.name for record in records if record.kind == "STEP"]
    assert names[0] == names[2]
    assert names[1].endswith('"name": "the \\"other\\" "}')
    assert memory.counters() == {"steps": 3, "tokens": 2}


def test_another_thread_inside_a_step_is_counted_and_the_owner_is_untouched(memory: MemoryWorker) -> None:
    worker = memory.worker
    contexts = []

    def other() -> None:
        with worker.step() as step:  # 1
            with worker.forward, worker.backward:  # 2, 3
                step.set(tokens=9, bucket="x", y=1)  # 4
            contexts.append(step.produced())
            step.consumed(7)

    with worker.step() as step, worker.forward:
        step.set(tokens=5)
        in_thread(other)
        with worker.backward:
            pass
    assert memory.shapes() == [
        ("PHASE", "busy backward", "", 1),
        ("PHASE", "busy forward", "", 1),
        (*STEP, 1),
    ]
    assert memory.counters() == {"steps": 1, "tokens": 5, "wrong_thread": 4}
    assert contexts == [NULL]


def test_a_phase_ends_in_whichever_thread_ends_it(memory: MemoryWorker) -> None:
    worker = memory.worker
    worker.queue_get.begin()
    in_thread(worker.queue_get.end)
    with worker.step():
        worker.forward.begin()
        in_thread(worker.forward.end)
    assert memory.shapes() == [
        ("PHASE", "starved queue_get", "", 0),
        ("PHASE", "busy forward", "", 1),
        (*STEP, 1),
    ]
    assert memory.counters() == {"steps": 1}


def test_a_phase_that_another_thread_holds_outside_a_step_is_counted_once(memory: MemoryWorker) -> None:
    worker = memory.worker

    def other() -> None:
        with worker.forward:
            pass

    with worker.forward:
        in_thread(other)
    with worker.forward:
        pass
    assert memory.shapes() == [("PHASE", "busy forward", "", 0)] * 2
    assert memory.counters() == {"wrong_thread": 1}


def test_a_phase_around_a_step_is_stale_where_it_is_entered_again(memory: MemoryWorker) -> None:
    worker = memory.worker
    with worker.forward, worker.step(), worker.forward:
        pass

    def other() -> None:
        with worker.forward, worker.backward:
            pass

    in_thread(other)
    assert memory.shapes() == [
        ("PHASE", "busy forward", "", 1),
        (*STEP, 1),
        ("PHASE", "busy backward", "", 0),
        ("PHASE", "busy forward", "", 0),
    ]
    assert memory.counters() == {"steps": 1, "stale": 1}


def test_a_phase_that_a_step_left_open_is_stale_from_its_end_on(memory: MemoryWorker) -> None:
    worker = memory.worker

    def held() -> Generator[None, None, None]:
        with worker.forward:
            yield

    def other() -> None:
        with worker.forward:
            pass

    abandoned = held()
    with worker.step():
        next(abandoned)
    in_thread(other)
    abandoned.close()
    assert memory.shapes() == [(*STEP, 1), ("PHASE", "busy forward", "", 0)]
    assert memory.counters() == {"steps": 1, "stale": 1}


class StrangeError(Exception):
    pass


class Unspeakable(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (ValueError("x"), "ValueError"),
        (StrangeError(), f"{__name__}.StrangeError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit"),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError"),
        (queue.Empty(), ""),
        (queue.Full(), ""),
        (StopIteration(), ""),
        (StopAsyncIteration(), ""),
        (GeneratorExit(), ""),
        (asyncio.QueueEmpty(), ""),
        (asyncio.QueueFull(), ""),
        *(
            (getattr(module, name)(), "")
            for module, name in ((queue, "ShutDown"), (asyncio, "QueueShutDown"))
            if hasattr(module, name)
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exceptions_pass_through_untouched_and_outcomes_are_no_errors(
    memory: MemoryWorker, error: BaseException, recorded: str
) -> None:
    worker = memory.worker
    caught: BaseException | None = None
    try:
        with worker.step(), worker.forward:
            raise error
    except BaseException as passed:  # noqa: BLE001  any kind
        caught = passed
    assert caught is error
    assert (error.__context__, error.__cause__) == (None, None)
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_next is None  # no frame of ours
    assert memory.shapes() == [("PHASE", "busy forward", recorded, 1), ("STEP", "", recorded, 1)]


def test_an_error_whose_class_does_not_tell_its_name_is_recorded_as_other(memory: MemoryWorker) -> None:
    class RaisedError(Exception, metaclass=Unspeakable):
        pass

    with pytest.raises(Exception) as caught, memory.worker.step():  # noqa: PT011  its name cannot be read
        raise RaisedError
    assert type(caught.value) is RaisedError
    assert memory.shapes() == [("STEP", "", "_OTHER", 1)]


def test_an_error_that_is_handled_inside_a_step_marks_the_phase_alone(memory: MemoryWorker) -> None:
    worker = memory.worker
    with worker.step():
        with pytest.raises(ValueError, match="x"), worker.forward, worker.forward:
            raise ValueError("x")
        with worker.forward:
            pass
    assert memory.shapes() == [
        *[("PHASE", "busy forward", "ValueError", 1)] * 2,
        ("PHASE", "busy forward", "", 1),
        (*STEP, 1),
    ]


def test_a_generator_may_hold_a_phase(memory: MemoryWorker) -> None:
    worker = memory.worker

    def batches() -> Generator[int, None, None]:
        for n in range(3):
            with worker.forward:
                yield n

    with worker.step():
        assert list(batches()) == [0, 1, 2]
        left = batches()
        next(left)
        left.close()
    with worker.step():
        abandoned = batches()
        next(abandoned)
    abandoned.close()  # outside the step that it began in: counted when the phase is entered again
    with worker.step(), worker.forward:
        pass
    assert memory.shapes() == [
        *[("PHASE", "busy forward", "", 1)] * 4,
        (*STEP, 1),
        (*STEP, 2),
        ("PHASE", "busy forward", "", 3),
        (*STEP, 3),
    ]
    assert memory.counters() == {"steps": 3, "stale": 1}


PHASES, STEPS, OFF = 0, 1, 2


@pytest.mark.parametrize(
    ("detail", "recorded"),
    [
        (OFF, []),
        (STEPS, [("ATTRIBUTE", "a", "", 1), (*STEP, 1)]),
        (PHASES, [("PHASE", "busy forward", "", 1), ("ATTRIBUTE", "a", "", 1), (*STEP, 1)]),
    ],
)
def test_detail_is_taken_at_the_beginning_of_a_step_and_holds_until_its_end(
    memory: MemoryWorker, detail: int, recorded: Any
) -> None:
    worker = memory.worker
    for meanwhile in (PHASES, STEPS, OFF):
        memory.control[0] = detail
        with worker.step() as step:
            memory.control[0] = meanwhile
            with worker.forward:
                pass
            step.set(a=1)
            assert (step.produced() != NULL) == bool(step.id) == (detail != OFF)
    seen = memory.shapes()
    assert [record[:3] for record in seen] == [record[:3] for record in recorded * 3]
    assert memory.counters() == ({} if detail == OFF else {"steps": 3, "puts": 3})
    memory.control[0] = OFF
    with worker.forward:
        pass
    memory.control[0] = PHASES
    with worker.forward:
        pass
    assert memory.shapes() == [("PHASE", "busy forward", "", 0)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda w: w.phase("a b"),
            "a phase name is 1 to 64 letters, digits, '_' or '.', got 'a b'; try 'pack_hidden'",
        ),
        (
            lambda w: w.phase(""),
            "a phase name is 1 to 64 letters, digits, '_' or '.', got ''; try 'pack_hidden'",
        ),
        (
            lambda w: w.phase(["x"]),
            "a phase name is 1 to 64 letters, digits, '_' or '.', got ['x']; try 'pack_hidden'",
        ),
        (
            lambda w: w.phase("x", state="idle"),
            "a phase's state is one of busy, starved, backpressured, lock_wait, got 'idle'",
        ),
        (
            lambda w: w.phase("queue_get", state="idle"),
            "a phase's state is one of busy, starved, backpressured, lock_wait, got 'idle'",
        ),
        (
            lambda w: w.phase("x", state=["busy"]),
            "a phase's state is one of busy, starved, backpressured, lock_wait, got ['busy']",
        ),
        (
            lambda w: w.phase("queue_get", state="busy"),
            "phase 'queue_get' of target 0 has state 'starved'; it cannot become 'busy': use another name",
        ),
    ],
)
def test_a_wrong_phase_is_said_at_once(
    memory: MemoryWorker, make: Callable[[Any], Any], message: str
) -> None:
    for worker in (memory.worker, otel_dflash.Telemetry().worker("target", 0)):
        assert worker.queue_get is worker.phase("queue_get") is worker.phase("queue_get", "starved")
        with pytest.raises(ConfigError) as caught:
            make(worker)
        assert str(caught.value) == message
    with pytest.raises(
        AttributeError,
        match=r"a worker has no 'encode'; the usual phases are queue_get, .*; one of your own is worker\.phase\('encode'\)",
    ):
        memory.worker.encode  # noqa: B018
