"""What the agent costs: records/s into the recording, CPU per span beside the SDK's own tracer and exporter,
memory.

Run: python tests/bench/bench_agent.py     (about two minutes)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from timing import machine, table

from otel_dflash import Telemetry
from otel_dflash.agent.drain import Drain
from otel_dflash.agent.sinks.spans import SpanSink
from otel_dflash.config import node_name
from otel_dflash.console import log
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.session import Session, create_session, remove_session

WORKERS = 8
STEPS = 1000  # per worker and round: with three phases each they fit a ring
ROUNDS = 7
PHASES = ("model_forward", "pack_hidden", "queue_put")

RECEIVER = """
import sys
sys.path.insert(0, {tests!r})
from otlp_receiver import OtlpReceiver
with OtlpReceiver() as receiver:
    receiver.store_spans = receiver.store_metrics = lambda request, headers: None
    print(receiver.grpc_endpoint, receiver.http_endpoint, flush=True)
    sys.stdin.read()
"""

TRAINER = """
import sys, threading, time
import otel_dflash
telemetry = otel_dflash.start()
end = time.monotonic() + {seconds}
def work(index):
    worker = telemetry.worker("drafter", index)
    while time.monotonic() < end:
        with worker.step() as step:
            with worker.forward: pass
            with worker.backward: pass
            with worker.optimizer: pass
            step.set(tokens=100)
threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def write_steps(telemetry: Telemetry, workers: list[object]) -> int:
    """Publish STEPS steps of each worker; return the number of spans, which is the number of records."""
    for worker in workers:
        phases = [worker.phase(name) for name in PHASES]  # type: ignore[attr-defined]
        for _ in range(STEPS):
            with worker.step() as step:  # type: ignore[attr-defined]
                step.set(tokens=4096, loss_tokens=2048, bucket=512)
                for phase in phases:
                    with phase:
                        pass
    return len(workers) * STEPS * (1 + len(PHASES))


def record(session: Session, rounds: int) -> list[float]:
    """Fill the rings and take them to the recording, again and again; return records/s of each round."""
    telemetry = Telemetry(session)
    workers: list[object] = [telemetry.worker("target", index, gpu=index) for index in range(WORKERS)]
    info = RunInfo(
        session.run_id,
        node_name(),
        session.anchor_wall_ns,
        session.anchor_mono_ns,
        session.anchor_wall_ns,
        "bench",
    )
    create_recording(session.recording, info)
    writer = RecordingWriter(session.recording, 2 << 30)
    drain = Drain(session, writer, log, 10_000_000_000)
    drain.poll()
    rates = []
    for _ in range(rounds):
        records = write_steps(telemetry, workers)
        t0 = time.perf_counter()
        taken = drain.poll()
        rates.append(taken / (time.perf_counter() - t0))
        assert taken == records, f"{taken} of {records} records"
    telemetry.close()
    drain.poll()
    writer.close()
    return rates


def replayed_cpu_us(recording: Path, exporter: SpanExporter) -> float:
    """Return CPU per span of replaying a recording through an exporter."""
    spans_before = RecordingReader(recording).position
    assert spans_before == 0
    sink = SpanSink("bench", exporter, recording, keep_cursor=False)
    cpu = time.process_time()
    sink.run()
    spent = time.process_time() - cpu
    exporter.shutdown()
    return spent / sink.delivered * 1e6


def sdk_cpu_us(exporter: SpanExporter, spans: int) -> float:
    """Return CPU per span of the SDK's tracer, batch processor and exporter for steps of the same shape."""
    provider = TracerProvider(resource=Resource.create({"service.name": "dflash-target"}))
    processor = BatchSpanProcessor(exporter, max_queue_size=spans + 1)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("bench")
    worker = {
        "dflash.worker.role": "target",
        "dflash.worker.id": "0",
        "dflash.gpu.index": 0,
        "dflash.clock.domain": "host",
    }
    step_values = {
        **worker,
        "thread.id": 1,
        "thread.name": "main",
        "dflash.batch.tokens": 4096,
        "dflash.batch.loss_tokens": 2048,
    }
    cpu = time.process_time()
    for _ in range(spans // (1 + len(PHASES))):
        with tracer.start_as_current_span(
            "target.step", attributes={**step_values, "dflash.bucket.id": "512"}
        ):
            for name in PHASES:
                with tracer.start_as_current_span(
                    f"target.{name}", attributes={**worker, "dflash.worker.state": "busy"}
                ):
                    pass
    provider.force_flush(120_000)
    spent = time.process_time() - cpu
    provider.shutdown()
    return spent / spans * 1e6


def resident_bytes(directory: Path, endpoint: str, seconds: float) -> tuple[int, int]:
    """Return the largest resident memory of an agent that serves 8 workers at full speed and exports, and
    records/s."""
    environment = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_DFLASH_DIR": str(directory),
        "OTEL_DFLASH_RUN_ID": "rss",
    }
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER.format(seconds=seconds)], env=environment)
    largest = 0
    agents: list[psutil.Process] = []
    while trainer.poll() is None or any(agent.is_running() for agent in agents):
        agents = agents or [
            p for p in psutil.process_iter(["cmdline"]) if "rss-" in " ".join((p.info["cmdline"] or [])[-1:])
        ]
        for agent in agents:
            try:
                largest = max(largest, agent.memory_info().rss)
            except psutil.NoSuchProcess:
                agents = []
                break
        else:
            time.sleep(0.05)
            continue
        break
    reader = RecordingReader(directory / "rss")
    records = 0
    while frames := reader.read():
        records += sum(frame.count for frame in frames if frame.kind == 2)
    return largest, int(records / seconds)


def main() -> None:
    """Measure and print."""
    print(machine())
    with TemporaryDirectory() as name:
        directory = Path(name)
        session = create_session("bench", directory)
        try:
            rates = record(session, ROUNDS)
        finally:
            remove_session(session)
        spread = f"{min(rates):,.0f} - {max(rates):,.0f}"
        print(
            f"\ndrain into the recording: {sorted(rates)[len(rates) // 2]:,.0f} records/s ({spread}; "
            "bar: >= 200,000)"
        )
        spans = WORKERS * STEPS * (1 + len(PHASES)) * ROUNDS
        code = RECEIVER.format(tests=str(Path(__file__).parents[1]))
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout
            grpc_endpoint, http_endpoint = receiver.stdout.readline().split()
            makers: dict[str, Callable[[], SpanExporter]] = {
                "gRPC": lambda: GrpcExporter(endpoint=grpc_endpoint, insecure=True),
                "HTTP": lambda: HttpExporter(endpoint=f"{http_endpoint}/v1/traces"),
            }
            for protocol, make in makers.items():
                samples: dict[str, list[float]] = {
                    "SDK tracer and exporter": [],
                    "replay and the same exporter": [],
                }
                for _ in range(3):
                    samples["SDK tracer and exporter"].append(sdk_cpu_us(make(), spans // ROUNDS))
                    samples["replay and the same exporter"].append(
                        replayed_cpu_us(directory / "bench", make())
                    )
                table(
                    f"CPU per span, OTLP over {protocol}",
                    samples,
                    "SDK tracer and exporter",
                    {"replay and the same exporter": "<= 1.0"},
                    "us",
                )
            rss, rate = resident_bytes(directory, grpc_endpoint, 10)
            print(
                f"\nagent with 8 workers at full speed ({rate:,} records/s) and gRPC export: "
                f"{rss / 1e6:.0f} MB resident (bar: <= 150 MB)"
            )
            receiver.terminate()


if __name__ == "__main__":
    main()
