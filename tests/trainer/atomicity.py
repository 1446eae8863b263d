"""The writer's rule of atomicity, checked by disassembly and by force. `python -m tests.trainer.atomicity
CHECK` needs no packages."""

from __future__ import annotations

import dis
import gc
import json
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from otel_dflash.ring import Ring
from otel_dflash.trainer.writer import python as writer
from tests.trainer.ring_reader import MemoryWorker

# What the interpreter does in one go, without looking for signals, other threads or garbage.
PLAIN = {
    "NOP",
    "CACHE",
    "EXTENDED_ARG",
    "COPY",
    "DUP_TOP",
    "DUP_TOP_TWO",
    "ROT_TWO",
    "ROT_THREE",
    "SWAP",
    "STORE_SUBSCR",
    "COMPARE_OP",
}
PLAIN |= {
    "LOAD_DEREF",
    "STORE_DEREF",
    "LOAD_CONST",
    "LOAD_FAST",
    "STORE_FAST",
    "LOAD_SMALL_INT",
    "LOAD_GLOBAL",
    "LOAD_ATTR",
    "STORE_ATTR",
}
PLAIN |= {
    "LOAD_FAST_LOAD_FAST",
    "STORE_FAST_LOAD_FAST",
    "STORE_FAST_STORE_FAST",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
}
PLAIN |= {
    "BINARY_OP",
    "BINARY_ADD",
    "BINARY_SUBTRACT",
    "BINARY_MODULO",
    "BINARY_SUBSCR",
    "TO_BOOL",
    "NOT_TAKEN",
    "UNARY_NOT",
    "CONTAINS_OP",
}


DEPTH_MAX = 5  # of handlers that interrupt each other: on a busy machine the timer is quicker than they are


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all that lie in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [instruction for instruction in dis.get_instructions(code) if instruction.opname != "CACHE"]


def loads(instruction: dis.Instruction, *names: str) -> bool:
    values = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return instruction.opname.startswith("LOAD") and any(name in values for name in names)


def unsafe(code: types.CodeType, first: int, last: int, may_skip: bool = True) -> list[str]:
    """Return what must not lie between two instructions. `may_skip`: forward jumps past the last, which are
    not taken on this way."""
    listed = instructions(code)
    end = listed[last].offset
    wrong = []
    for instruction in listed[first : last + 1]:
        skips = (
            "JUMP" in instruction.opname
            and "IF" in instruction.opname
            and "POP" in instruction.opname
            and instruction.argval > end
        )
        if instruction.opname not in PLAIN and not (may_skip and skips):
            wrong.append(f"{code.co_name}: {instruction.opname} {instruction.argval}")
    return wrong


def torn_slots() -> dict[str, list[str]]:
    """From comparing the index with the limit to storing word 0: for each function that stores it, what is
    not plain."""
    found = {}
    for code in codes(compile_of(writer)):
        listed = instructions(code)
        for last, instruction in enumerate(listed):
            if instruction.opname == "STORE_SUBSCR" and any(
                loads(near, "w0") for near in listed[last - 3 : last]
            ):
                first = max(
                    k
                    for k in range(last)
                    if listed[k].opname == "COMPARE_OP" and {"i", "limit"} == derefs(listed[k - 2 : k])
                )
                found[code.co_name] = unsafe(code, first, last)
    return found


def torn_laps() -> list[str]:
    """In slow(): calls anywhere; and whatever is not plain from moving the index to having the limit that
    fits it."""
    (code,) = [code for code in codes(compile_of(writer)) if code.co_name == "slow"]
    listed = instructions(code)
    calls = [instruction.opname for instruction in listed if "CALL" in instruction.opname]
    stores = [(k, listed[k].argval) for k in range(len(listed)) if listed[k].opname == "STORE_DEREF"]
    first = next(k for k, name in stores if name == "i")
    last = next(k for k, name in stores if name == "limit")
    return calls + unsafe(code, first, last, may_skip=False)


def torn_names() -> list[str]:
    """In Ring.intern: from looking for the key to counting the name."""
    code = Ring.intern.__code__
    listed = instructions(code)
    first = max(k for k in range(len(listed)) if listed[k].opname == "CONTAINS_OP")
    last = max(k for k in range(len(listed)) if listed[k].opname == "STORE_SUBSCR")
    return unsafe(code, first, last)


def derefs(listed: list[dis.Instruction]) -> set[str]:
    return {instruction.argval for instruction in listed if instruction.opname == "LOAD_DEREF"}


def compile_of(module: types.ModuleType) -> types.CodeType:
    assert module.__file__
    with open(module.__file__, encoding="utf-8") as file:
        return compile(file.read(), module.__file__, "exec", dont_inherit=True)


def rules() -> dict[str, Any]:
    return {"slots": torn_slots(), "laps": torn_laps(), "names": torn_names()}


# By force: what is written must be what is read and what is counted as dropped.


class Reading:
    """Takes the records of workers until the end of the block: in a thread, as the agent does, or when told
    to."""

    def __init__(self, *workers: MemoryWorker, by_thread: bool = True) -> None:
        self.workers = workers
        self.by_thread = by_thread
        self.taken = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.stop.is_set():
            self.take()

    def take(self) -> None:
        for worker in self.workers:
            self.taken += len(worker.take())

    def __enter__(self) -> Reading:
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        if self.by_thread:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        if self.by_thread:
            self.thread.join()
        sys.setswitchinterval(self.interval)
        self.take()
        for worker in self.workers:
            worker.reader.assert_no_hole()

    def verdict(self, written: int) -> dict[str, Any]:
        counters = [worker.counters() for worker in self.workers]
        full = sum(counts.pop("ring_full", 0) for counts in counters)
        others = sum(value for counts in counters for name, value in counts.items() if name != "steps")
        return {
            "missing": written - self.taken - full,
            "dropped some": full > 0,
            "read some": self.taken > 0,
            "other counts": others,
        }


def repeat(action: Callable[[], None], seconds: float = 0.5, least: int = 300) -> int:
    """Do it for a while; return how often."""
    end = time.monotonic() + seconds
    count = 0
    while count < least or time.monotonic() < end:
        action()
        count += 1
    return count


def signals() -> dict[str, Any]:
    """A handler uses the worker that it interrupted: the same phase, another one, and attributes."""
    memory = MemoryWorker()
    worker = memory.worker
    forward, other = worker.forward, worker.phase("handler")
    handled = depth = 0

    def handle(*_: object) -> None:
        nonlocal handled, depth
        if depth < DEPTH_MAX:
            depth += 1
            with forward, other:
                handled += 1
            depth -= 1

    def work() -> None:
        with worker.step() as step:
            step.set(a=1)
            with forward, worker.backward:
                pass
            signal.setitimer(signal.ITIMER_REAL, 3e-5, 3e-5)
            with forward, worker.backward:
                pass
            for _ in range(20):
                with forward:
                    pass
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with Reading(memory) as reading:
            steps = repeat(work, 1.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    verdict = reading.verdict(steps * 26 + handled * 2)
    return verdict | {"interrupted": handled > 100}


def destructors() -> dict[str, Any]:
    """Garbage whose destructors and weak references use the worker is collected at every allocation of a
    container."""
    memory = MemoryWorker()
    worker = memory.worker
    forward, other = worker.forward, worker.phase("destructor")
    ended = 0

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            nonlocal ended
            with forward, other:
                ended += 1

    def gone(_: object) -> None:
        nonlocal ended
        with other, forward:
            ended += 1

    references: list[Any] = []

    def work() -> None:
        with worker.step():
            for name in ("a", "b"):
                garbage = Garbage()
                references[:] = [weakref.ref(garbage, gone), *references[:3]]
                del garbage
                with forward, worker.phase(name):
                    pass
        if memory.counters()["steps"] % 8 == 0:
            reading.take()

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with Reading(
            memory, by_thread=False
        ) as reading:  # a destructor runs in the thread that made the garbage collector start
            steps = repeat(work)
            gc.collect()
    finally:
        gc.set_threshold(*threshold)
    return reading.verdict(steps * 5 + ended * 2) | {"ended": ended > steps}


def threads() -> dict[str, Any]:
    """Eight threads, each with a worker of its own, under one reader."""
    current: dict[int, Any] = {}
    memories = [MemoryWorker(index=index, current=current) for index in range(8)]

    def work(memory: MemoryWorker) -> None:
        worker = memory.worker
        for _ in range(300):
            with worker.step() as step:
                with worker.forward:
                    step.set(a=1)
                with worker.backward:
                    pass

    with Reading(*memories) as reading:
        run_all([threading.Thread(target=work, args=(memory,)) for memory in memories])
    return reading.verdict(8 * 300 * 4) | {"steps": sum(memory.counters()["steps"] for memory in memories)}


def handing_over() -> dict[str, Any]:
    """One worker that eight threads use in turns."""
    memory = MemoryWorker()
    worker = memory.worker
    turn = threading.Lock()

    def work() -> None:
        for _ in range(300):
            with turn:
                with worker.forward:
                    pass
                with worker.step(), worker.forward:
                    pass

    with Reading(memory) as reading:
        run_all([threading.Thread(target=work) for _ in range(8)])
    return reading.verdict(8 * 300 * 3) | {"steps": memory.counters()["steps"]}


def contending() -> dict[str, Any]:
    """One worker whose steps eight threads enter at the same time, which they must not: each is recorded or
    counted."""
    memory = MemoryWorker()
    worker = memory.worker

    def work() -> None:
        for _ in range(1000):
            with worker.step():
                pass

    with Reading(memory) as reading:
        run_all([threading.Thread(target=work) for _ in range(8)])
    counters = memory.counters()
    return {
        "unaccounted": 8 * 1000 - counters["steps"] - counters.get("wrong_thread", 0),
        "missing": counters["steps"] - reading.taken - counters.get("ring_full", 0),
        "left open": sum(writer is not None for writer in memory.current.values()),
    } | {
        name: value for name, value in counters.items() if name not in ("steps", "wrong_thread", "ring_full")
    }


def naming() -> dict[str, Any]:
    """Eight threads and a signal handler publish the same names at the same time."""
    memory = MemoryWorker()
    ring = memory.ring
    texts = [f"name {n}" for n in range(300)]
    seen: list[list[int]] = []
    handled = depth = 0

    def handle(*_: object) -> None:
        nonlocal handled, depth
        if depth < DEPTH_MAX:
            depth += 1
            handled += 1
            ring.intern(7, f"name {handled % 300}")
            ring.intern(7, f"handler {handled % 100}")
            depth -= 1

    before = signal.signal(signal.SIGALRM, handle)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3e-5, 3e-5)
        run_all(
            [
                threading.Thread(target=lambda: seen.append([ring.intern(7, text) for text in texts]))
                for _ in range(8)
            ]
        )
        ours = [ring.intern(7, text) for text in texts]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGALRM, before)
    names = memory.reader.names()
    return {
        "all ids agree": seen == [ours] * 8,
        "ids say the names": [names[k][1] for k in ours] == texts,
        "twice": len(names) - len(set(names)),
        "counters": memory.counters(),
        "interrupted": handled > 10,
    }


def run_all(started: list[threading.Thread]) -> None:
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


CHECKS = {
    check.__name__: check
    for check in (rules, signals, destructors, threads, handing_over, contending, naming)
}

if __name__ == "__main__":
    print(json.dumps({name: CHECKS[name]() for name in sys.argv[1:]}, default=list))
