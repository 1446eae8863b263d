"""The ring's writer: atomic, complete, exact, and nothing else moves. Its rule of atomicity is checked in
tests/trainer/atomicity.py."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from otel_dflash.session import Session
from tests.trainer import atomicity
from tests.trainer.pythons import check, on_each_python
from tests.trainer.ring_reader import MemoryWorker, cells

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.timeout(60, method="thread")  # the alarm is used by the tests themselves
EXACT = {"missing": 0, "dropped some": True, "read some": True, "other counts": 0}


@on_each_python
def test_nothing_can_come_between_taking_a_slot_and_publishing_it(python: str) -> None:
    assert check(python, "rules") == {"slots": {"put": [], "phase_exit": []}, "laps": [], "names": []}


def test_the_rule_sees_what_it_forbids() -> None:
    source = """
def bind():
    w0 = w1 = clock = slow = word = None
    i = limit = base = 0
    def reading_the_clock():
        nonlocal i
        if i != limit:
            o = i; i = o + 1; w1[o] = clock(); w0[o] = word
    def looping():
        nonlocal i
        while i == limit:
            if slow(): return
        o = i; i = o + 1; w0[o] = word
    def packing():
        nonlocal i
        if i != limit:
            o = i; i = o + 1; w0[o] = [word]
"""
    for code in atomicity.codes(compile(source, "planted", "exec")):
        if code.co_name in ("reading_the_clock", "looping", "packing"):
            listed = atomicity.instructions(code)
            first = next(k for k, instruction in enumerate(listed) if instruction.opname == "COMPARE_OP")
            last = max(k for k, instruction in enumerate(listed) if instruction.opname == "STORE_SUBSCR")
            assert atomicity.unsafe(code, first, last) != [], code.co_name


@on_each_python
@pytest.mark.parametrize(
    ("name", "proof"),
    [
        ("signals", {"interrupted": True}),
        ("destructors", {"ended": True}),
        ("threads", {"steps": 2400}),
        ("handing_over", {"steps": 2400}),
    ],
)
def test_each_record_is_read_or_counted_as_dropped_whatever_interrupts(
    python: str, name: str, proof: dict[str, Any]
) -> None:
    assert check(python, name) == EXACT | proof


@on_each_python
def test_of_two_threads_that_enter_a_step_at_once_one_is_counted(python: str) -> None:
    assert check(python, "contending") == {"unaccounted": 0, "missing": 0, "left open": 0}


def test_full_ring_drops_the_newest_and_counts_it() -> None:
    memory = MemoryWorker(slots=8)
    with memory.worker.step() as step:
        for n in range(11):
            step.set(n=n)
    assert [record.words[4] for record in memory.take()] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert memory.counters() == {"steps": 1, "ring_full": 4}
    with memory.worker.step() as step:
        for n in range(6):
            step.set(n=n)
    assert [record.words[4] for record in memory.take()[:-1]] == [0, 1, 2, 3, 4, 5]
    assert memory.counters() == {"steps": 2, "ring_full": 4}


def test_freed_slots_are_used_at_once_in_the_middle_of_a_lap() -> None:
    memory = MemoryWorker(slots=8)
    worker = memory.worker
    with worker.step():
        for lap in range(40):
            for _ in range(3):
                with worker.forward:
                    pass
            assert len(memory.take()) == 3, lap
    assert memory.counters() == {"steps": 1}


def test_laps_wrap_and_none_is_zero() -> None:
    memory = MemoryWorker(slots=4)
    laps = (1 << 24) - 3  # whole laps behind us
    writing = cells(memory.worker.forward.__exit__)
    writing["lap"].cell_contents = laps + 1 << 40
    writing["base"].cell_contents = 4 * laps
    memory.ring.words[8] = 4 * laps
    seen = []
    with memory.worker.step():
        for _ in range(5):
            for _ in range(4):
                with memory.worker.forward:
                    pass
            seen.append({record.words[0] >> 40 for record in memory.take()})
    assert seen == [{0xFFFFFE}, {0xFFFFFF}, {1}, {2}, {3}]
    assert memory.counters() == {"steps": 1}


def test_tokens_beyond_64_bits_do_not_raise() -> None:
    memory = MemoryWorker()
    for _ in range(3):
        with memory.worker.step() as step:
            step.set(tokens=(1 << 63) - 1)
    assert memory.counters() == {"steps": 3, "tokens": 3 * ((1 << 63) - 1) % (1 << 64)}


@pytest.mark.parametrize("what", ["phase", "phase outside a step", "step", "attributes"])
def test_nothing_is_kept(what: str) -> None:
    memory = MemoryWorker(slots=1024)
    worker = memory.worker
    forward = worker.forward

    def phase() -> None:
        with forward:
            pass

    def step() -> None:
        with worker.step():
            pass

    def attributes() -> None:
        with worker.step() as step:
            step.set(tokens=5, bucket=512, rate=0.5)

    work = {"phase": phase, "phase outside a step": phase, "step": step, "attributes": attributes}[what]

    def many(times: int) -> None:
        for n in range(times):
            work()
            if n % 200 == 0:
                memory.ring.words[8] = 1 << 40  # a reader that took everything

    with worker.step():
        pass
    if what == "phase":
        worker.step().__enter__()
    many(3000)
    gc.collect()
    gc.disable()
    try:
        tracked = gc.get_count()[0]
        many(2000)
        assert gc.get_count()[0] - tracked < 20
        tracemalloc.start()
        many(2000)
        before = tracemalloc.get_traced_memory()[0]
        many(20_000)
        assert tracemalloc.get_traced_memory()[0] - before < 2000
    finally:
        tracemalloc.stop()
        gc.enable()


UNOBSERVED = """
import queue, random, sys
random.seed(7)
before = random.getstate()
import otel_dflash
telemetry = otel_dflash.start()
worker = telemetry.worker("target", 0)
batches = telemetry.wrap_queue(queue.Queue(), "batches")
def work(n):
    for k in range(n):
        with worker.step() as step:
            with worker.queue_put:
                batches.put(k)
            with worker.queue_get:
                batches.get()
            with worker.forward:
                step.set(tokens=k, bucket="long", rate=0.5, name="x")
            step.consumed(step.produced())
work(10)
events = []
sys.addaudithook(lambda event, _: events.append(event))
work(1000)
print(set(events), random.getstate() == before)
"""


def test_training_raises_no_audit_event_but_for_the_identity_of_queued_items_and_draws_no_random_number(
    session: Session,
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", UNOBSERVED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout, result.stderr) == ("{'builtins.id'} True\n", "")


def test_the_random_stream_of_this_process_does_not_move() -> None:
    random.seed(3)
    state = random.getstate()
    memory = MemoryWorker()
    with memory.worker.step() as step, memory.worker.forward:
        step.set(tokens=1)
    assert random.getstate() == state
