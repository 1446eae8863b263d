"""The forms of a phase and a step: `with`, a call, a decorator, begin() and end(), all with the same records; and
what help() shows of them."""

from __future__ import annotations

import functools
import inspect
import pydoc
import queue
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest

import otel_dflash
from otel_dflash import ConfigError, Step, Worker
from tests.trainer.ring_reader import MemoryWorker

TURN = [("PHASE", "busy forward", "", 1), ("STEP", "", "", 1)]
FAILED = [("PHASE", "busy forward", "ValueError", 1), ("STEP", "", "ValueError", 1)]


@pytest.fixture
def memory() -> MemoryWorker:
    return MemoryWorker(slots=1024)


def by_with(worker: Worker, work: Callable[[], None]) -> None:
    with worker.step as step, worker.forward:
        step.set(tokens=1)
        work()


def by_call(worker: Worker, work: Callable[[], None]) -> None:
    with worker.step() as step, worker.forward():
        step.set(tokens=1)
        work()


def by_decorator(worker: Worker, work: Callable[[], None]) -> None:
    @worker.step
    @worker.forward()
    def turn() -> None:
        worker.step.set(tokens=1)
        work()

    turn()


def by_begin_and_end(worker: Worker, work: Callable[[], None]) -> None:
    step = worker.step.begin()
    worker.forward.begin()
    step.set(tokens=1)
    try:
        work()
    except ValueError as error:
        worker.forward.end(error)
        step.end(error=error)
        raise
    worker.forward.end()
    step.end()


def fail() -> None:
    raise ValueError("x")


@pytest.mark.parametrize("form", [by_with, by_call, by_decorator, by_begin_and_end])
@pytest.mark.parametrize(("work", "recorded"), [(lambda: None, TURN), (fail, FAILED)])
def test_all_forms_record_the_same(
    memory: MemoryWorker,
    form: Callable[[Worker, Callable[[], None]], None],
    work: Callable[[], None],
    recorded: Any,
) -> None:
    for worker in (memory.worker, otel_dflash.Telemetry().worker("target", 0)):
        if work is fail:
            with pytest.raises(ValueError, match="x"):
                form(worker, work)
        else:
            form(worker, work)
    assert memory.shapes() == recorded
    assert memory.counters() == {"steps": 1, "tokens": 1}


def test_a_decorated_function_keeps_its_name_its_arguments_and_what_it_returns(memory: MemoryWorker) -> None:
    @memory.worker.phase("clip_grad", state="lock_wait")
    def clip(x: int, *, by: int = 2) -> int:
        """Clip it."""
        return x * by

    assert (clip(2), clip(2, by=5), clip.__name__, clip.__doc__) == (4, 10, "clip", "Clip it.")
    assert list(inspect.signature(clip).parameters) == ["x", "by"]
    assert memory.shapes() == [("PHASE", "lock_wait clip_grad", "", 0)] * 2


async def coroutine() -> None: ...


def generator() -> Generator[int, None, None]:
    yield 1


async def asynchronous_generator() -> AsyncGenerator[int, None]:
    yield 1


class AsynchronousCall:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (coroutine, "coroutine"),
        (generator, "generator"),
        (asynchronous_generator, "asynchronous_generator"),
        (functools.partial(coroutine), "coroutine"),
        (functools.partial(functools.partial(generator)), "generator"),
        (AsynchronousCall(), "an AsynchronousCall"),
        (functools.partial(AsynchronousCall()), "an AsynchronousCall"),
        (7, "an int"),
        ([], "a list"),
    ],
)
def test_what_a_call_does_not_run_is_refused_at_once(memory: MemoryWorker, function: Any, named: str) -> None:
    for worker in (memory.worker, otel_dflash.Telemetry().worker("target", 0)):
        for form, what in ((worker.forward, "a phase"), (worker.step, "a step")):
            with pytest.raises(ConfigError) as caught:
                form(function)
            assert str(caught.value) == (
                f"{what} records the calls of a plain function, not {named}; use `with` there"
            )


def test_any_callable_can_be_recorded(memory: MemoryWorker) -> None:
    assert memory.worker.forward(functools.partial(max, 3))(4) == 4
    assert memory.worker.forward(len)("ab") == 2
    assert memory.shapes() == [("PHASE", "busy forward", "", 0)] * 2


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (None, ""),
        (ValueError("x"), "ValueError"),
        (ValueError, "ValueError"),
        (queue.Empty(), ""),
        (StopIteration, ""),
        ("out of memory", "str"),
    ],
)
def test_end_takes_an_error_and_an_outcome_is_none(memory: MemoryWorker, error: Any, recorded: str) -> None:
    worker = memory.worker
    worker.step.begin()
    worker.forward.begin()
    worker.forward.end(error)
    worker.step.end(error)
    assert memory.shapes() == [("PHASE", "busy forward", recorded, 1), ("STEP", "", recorded, 1)]


def test_an_end_without_a_begin_records_nothing(memory: MemoryWorker) -> None:
    worker = memory.worker
    worker.forward.end()
    worker.step.end(ValueError())
    with worker.step:
        worker.forward.end()
    assert memory.shapes() == [("STEP", "", "", 1)]
    assert memory.counters() == {"steps": 1}


def test_a_step_that_is_begun_again_is_cut_off_and_counted(memory: MemoryWorker) -> None:
    worker = memory.worker
    worker.step.begin()
    worker.forward.begin()
    worker.forward.end()
    worker.step.begin()
    worker.step.end()
    assert memory.shapes() == [("PHASE", "busy forward", "", 1), ("STEP", "", "", 2)]
    assert memory.counters() == {"steps": 1, "stale": 1}


DOCUMENTED = ("begin", "end", "cancel", "set", "produced", "consumed")


def test_help_shows_the_same_signatures_and_texts_whether_on_or_off(memory: MemoryWorker) -> None:
    off = otel_dflash.Telemetry().worker("target", 0)
    for on_span, off_span, names in (
        (memory.worker.step, off.step, DOCUMENTED),
        (memory.worker.forward, off.forward, ("begin", "end")),
    ):
        for name in names:
            on, plain = getattr(on_span, name), getattr(off_span, name)
            assert (inspect.signature(on), on.__doc__) == (inspect.signature(plain), plain.__doc__), name
    assert (
        str(inspect.signature(memory.worker.step.end)) == "(error: 'BaseException | None' = None) -> 'None'"
    )
    assert list(inspect.signature(memory.worker.step.set).parameters) == [
        *("tokens", "loss_tokens", "bucket", "step", "batch_id", "other")
    ]


@pytest.mark.parametrize(
    ("what", "lines"),
    [
        (lambda w: w, ["with worker.step() as step:", "with worker.queue_get:"]),
        (lambda w: w.forward, ["with worker.forward:", "@worker.forward", "worker.forward.begin()"]),
        (
            lambda w: w.step,
            ["with worker.step() as step:", "@worker.step", "worker.step.begin()", "cancel()"],
        ),
        (lambda w: w.step.set, ["set(*, tokens", "_OTHER", "numpy"]),
    ],
    ids=["worker", "phase", "step", "set"],
)
def test_help_says_how_to_use_it(
    memory: MemoryWorker, what: Callable[[Worker], Any], lines: list[str]
) -> None:
    shown = pydoc.render_doc(what(memory.worker), renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    assert [line for line in lines if line not in shown] == []


def test_the_step_of_a_block_is_the_workers(memory: MemoryWorker) -> None:
    worker = memory.worker
    with worker.step as step:
        assert step is worker.step is worker.step()
    assert isinstance(worker.step, Step)
    assert worker.forward is worker.forward()
