"""What the hot path costs: the shipped phase, step and queue hand-over beside two clock reads and beside the
OTel SDK.

Run: python tests/bench/bench_phase.py     (about a minute; quote the ratios, not the ns: machines differ and
are noisy)
"""

from __future__ import annotations

import gc
import queue
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic_ns, perf_counter_ns

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer
from timing import machine, per_call_ns, table

from otel_dflash import Telemetry, Worker
from otel_dflash.agent.ring_reader import RingReader
from otel_dflash.session import (
    DETAIL_OFF,
    DETAIL_PHASES,
    Session,
    create_session,
    map_control,
    remove_session,
)

PHASES = 4000  # a burst; its records fit the ring
PHASES_PER_THREAD = 14000  # longer, so that starting the threads does not count
SPANS = 400
THREADS = 8


class Discard(SpanExporter):
    """Takes spans at no cost: what is measured is the caller's part."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class Recorder:
    """Workers over real rings, read between bursts as the agent does."""

    def __init__(self, session: Session) -> None:
        self.telemetry = Telemetry(session)
        self.control = map_control(session)
        self._session = session
        self._readers: dict[Path, RingReader] = {}

    def drain(self) -> int:
        taken = 0
        for path in self._session.path.glob("ring-*"):
            reader = self._readers.get(path) or self._readers.setdefault(path, RingReader(path))
            reader.look(over=True)  # nobody writes meanwhile
            while len(records := reader.published()):
                reader.advance(records)
                taken += len(records)
        return taken


def empty() -> int:
    for _ in range(PHASES):
        pass
    return PHASES


def clock_reads(count: int = PHASES) -> int:
    for _ in range(count):
        monotonic_ns()
        monotonic_ns()
    return count


def phases(worker: Worker, count: int = PHASES) -> int:
    """Phases inside a step, as in a trainer."""
    with worker.step():
        phase = worker.forward
        for _ in range(count):
            with phase:
                pass
    return count


def steps(worker: Worker) -> int:
    for _ in range(PHASES):
        with worker.step():
            pass
    return PHASES


def steps_with_values(worker: Worker) -> int:
    for _ in range(PHASES):
        with worker.step() as step:
            step.set(tokens=4096, loss_tokens=2048, bucket=512)
    return PHASES


def handovers(worker: Worker, items: queue.Queue[object]) -> int:
    """A put and a get, inside a step."""
    item = object()
    with worker.step():
        for _ in range(PHASES):
            items.put(item)
            items.get()
    return PHASES


def in_threads(bursts: list[Callable[[], int]]) -> int:
    """Bursts in as many threads at once; wall time over all calls: with one GIL, equal to one thread's if
    nothing is lost."""
    calls: list[int] = []
    threads = [threading.Thread(target=lambda burst=burst: calls.append(burst())) for burst in bursts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(calls)


def sdk_spans(tracer: Tracer, count: int = SPANS) -> int:
    with tracer.start_as_current_span("target.step"):
        for _ in range(count):
            with tracer.start_as_current_span("target.model_forward"):
                pass
    return count


def kept(worker: Worker) -> tuple[float, float]:
    """Return bytes and GC-tracked objects that a phase leaves behind: what 4 000 leave more than 1 000."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    left: list[tuple[int, int]] = []
    with worker.step():
        phase = worker.forward
        for count in (1000, 1000, 4000):
            for _ in range(count):
                with phase:
                    pass
            left.append((tracemalloc.get_traced_memory()[0], len(gc.get_objects())))
    tracemalloc.stop()
    gc.enable()
    (size_0, objects_0), (size_1, objects_1), (size_2, objects_2) = left
    return (size_2 - 2 * size_1 + size_0) / 3000, (objects_2 - 2 * objects_1 + objects_0) / 3000


def main() -> None:
    with TemporaryDirectory() as directory:
        session = create_session("bench", Path(directory))
        try:
            measure(Recorder(session))
        finally:
            remove_session(session)


def measure(recorder: Recorder) -> None:
    telemetry = recorder.telemetry
    one = telemetry.worker("target", 0)
    many = [telemetry.worker("drafter", index) for index in range(THREADS)]
    off = telemetry.worker("target", 1)
    plain: queue.Queue[object] = queue.Queue()
    wrapped = telemetry.wrap_queue(queue.Queue(), "hidden_states")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Discard()))
    tracer = provider.get_tracer("bench")

    def capture_off() -> int:
        recorder.control[0] = DETAIL_OFF
        calls = phases(off)
        recorder.control[0] = DETAIL_PHASES
        return calls

    variants = {
        "two clock reads": clock_reads,
        "empty loop": empty,
        "phase": lambda: phases(one),
        "phase, capture off": capture_off,
        "step": lambda: steps(one),
        "step with three attributes": lambda: steps_with_values(one),
        "queue.Queue put and get": lambda: handovers(one, plain),
        "queue.Queue put and get, wrapped": lambda: handovers(one, wrapped),
        f"two clock reads, {THREADS} threads": lambda: in_threads(
            [partial(clock_reads, PHASES_PER_THREAD)] * THREADS
        ),
        f"phase, {THREADS} threads": lambda: in_threads(
            [partial(phases, worker, PHASES_PER_THREAD) for worker in many]
        ),
        "SDK start_as_current_span": lambda: sdk_spans(tracer),
        f"SDK start_as_current_span, {THREADS} threads": lambda: in_threads(
            [partial(sdk_spans, tracer)] * THREADS
        ),
        "phase, Telemetry() without start": lambda: phases(Telemetry().worker("target", 0)),
    }
    samples = per_call_ns(variants, before=recorder.drain)
    loop = median(samples["empty loop"])
    net = {
        name: [value - loop for value in values] for name, values in samples.items() if name != "empty loop"
    }
    print(machine())
    table("Hot path, loop subtracted", net, "two clock reads", {"phase": "<= 8"})
    for threads in ("", f", {THREADS} threads"):
        phase, clocks, span = (
            median(net[f"{name}{threads}"])
            for name in ("phase", "two clock reads", "SDK start_as_current_span")
        )
        print(
            f"phase{threads}: {phase / clocks:.1f} x two clock reads (bar: <= 8), a span of the SDK "
            f"costs {span / phase:.0f} (bar: >= 25)"
        )
    handover = median(net["queue.Queue put and get, wrapped"]) - median(net["queue.Queue put and get"])
    print(
        f"a context across a queue adds {handover:.0f} ns to put and get: "
        f"{handover / median(net['two clock reads']):.1f} x two clock reads"
    )
    size, objects = kept(one)
    print(f"kept per phase: {size:.2f} bytes, {objects:.2f} GC-tracked objects (bar: 0 and 0)")
    provider.shutdown()


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    t0 = perf_counter_ns()
    main()
    print(f"({(perf_counter_ns() - t0) / 1e9:.0f} s)")
