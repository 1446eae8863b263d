"""What the backends cost: Jaeger with Badger by the span, Prometheus by the series and by the sample.

Run: python tests/bench/bench_backends.py     (about a minute; the engines must be built: make engines)

Jaeger gets spans as a collector sends them, compressed requests of up to 3 MB: one at a time while it keeps
up, ten at a time behind an outage; and beside that an agent's own requests. It answers when they are stored,
and is a new one for each way. Prometheus gets, every 10 s of recorded time, a point of each series of 25 and
of 125 nodes. CPU is what the kernel charged; memory is the largest resident set; disk is what Jaeger's files
take once it has ended.
"""

from __future__ import annotations

import gzip
import http.client
import queue
import signal
import statistics
import threading
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from bench_nodes import NAME, Meter, captured, spans_in, started
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from timing import machine, table

from otel_dflash.stack.engines import ENGINES, find
from otel_dflash.stack.services import SERVICES
from tests.stack.conftest import Started

ROUNDS = 3
BATCH_BYTES = 3_000_000  # as otelcol.yaml has it
CONSUMERS = 10  # of a sending queue, by default
SPAN_ROUNDS = 12  # of bench_agent: more spans than a Jaeger here takes
NODES = (125, 25)
POINTS = 5  # of each series, in each round
INTERVAL_NS = 10_000_000_000
GZIP_LEVEL = 1  # what is decompressed counts here, not how it was compressed
ALL_TAKEN = (b"", b"\n\0")  # an answer that says of no point or span that it was refused
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def batches(requests: list[bytes]) -> list[bytes]:
    """Put requests together as a collector does: one after another, encoded requests are one request."""
    found = [b""]
    for request in requests:
        if len(found[-1]) + len(request) > BATCH_BYTES:
            found.append(b"")
        found[-1] += request
    return found


def post(
    port: str, path: str, requests: list[bytes], senders: int, meter: Meter, compressed: bool = True
) -> float:
    """Send each request once, so many at a time; return the seconds until the last answer."""
    headers = {
        "Content-Type": "application/x-protobuf",
        **({"Content-Encoding": "gzip"} if compressed else {}),
    }
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    failures = []
    for request in requests:
        waiting.put(gzip.compress(request, GZIP_LEVEL) if compressed else request)

    def work() -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", int(port))) as connection:
            while not waiting.empty():
                try:
                    body = waiting.get_nowait()
                except queue.Empty:
                    return
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                said = answer.read()
                if answer.status != 200 or said not in ALL_TAKEN:
                    failures.append((answer.status, said))

    began_s = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(senders)]
    meter.watch(threads)
    assert not failures, failures[0]
    return time.monotonic() - began_s


def measure_jaeger(directory: Path, requests: list[bytes]) -> None:
    """Print what a span costs Jaeger: CPU, time, memory and disk. None is sent twice to one Jaeger: Badger
    would keep one of them."""
    samples: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    large = batches(requests)
    for variant, bodies, count, senders, compressed in (
        ("an agent's requests, one at a time", requests, 60, 1, False),
        ("a collector's batches, one at a time", large, 4, 1, True),
        ("a collector's batches, ten at a time", large, 10, CONSUMERS, True),
    ):
        assert len(bodies) >= ROUNDS * count, len(bodies)
        rates = []
        with started(directory, f"jaeger-{len(samples)}", SERVICES["jaeger"]) as jaeger:
            whole = Meter({"jaeger": jaeger})
            for turn in range(ROUNDS):
                share = bodies[turn * count : (turn + 1) * count]
                meter, spans = Meter({"jaeger": jaeger}), spans_in(share)
                rates.append(
                    spans
                    / post(jaeger.values["JAEGER_HTTP_PORT"], "/v1/traces", share, senders, whole, compressed)
                )
                samples.setdefault(variant, []).append(meter.spent_s()["jaeger"] / spans * 1e6)
            jaeger.end(signal.SIGTERM)
            disk_bytes = sum(
                path.stat().st_blocks * 512 for path in Path(jaeger.values["storage"]).rglob("*")
            )
        per_span = disk_bytes / spans_in(bodies[: ROUNDS * count])
        notes[variant] = (
            f"{statistics.median(rates):,.0f} spans/s ({min(rates):,.0f} - {max(rates):,.0f}), "
            f"{whole.resident_bytes['jaeger'] / 1e6:,.0f} MB, {per_span:.0f} bytes a span on disk"
        )
    table("Jaeger with Badger: CPU per span", samples, "a collector's batches, one at a time", notes, "us")


def points_at(request: ExportMetricsServiceRequest, began_ns: int, time_ns: int) -> bytes:
    """Return the request with all its points at that time, counted since `began_ns`, and each grown by
    one."""
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in getattr(metric, str(metric.WhichOneof("data"))).data_points:
                    point.start_time_unix_nano, point.time_unix_nano = began_ns, time_ns
                    if hasattr(point, "zero_count"):
                        point.count, point.zero_count = point.count + 1, point.zero_count + 1
                    else:
                        value = point.WhichOneof("value")
                        setattr(point, value, getattr(point, value) + 1)
    return request.SerializeToString()


def from_nodes(request: bytes, nodes: int) -> list[bytes]:
    """Return a request of each node, as a collector sends them on."""
    return batches([request.replace(NAME.encode(), f"node-{node:03}".encode()) for node in range(nodes)])


def said_by(prometheus: Started, name: str) -> float:
    """Return the sum of a metric of Prometheus's own."""
    with _DIRECT.open(f"{prometheus.url('PROMETHEUS_PORT')}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def measure_prometheus(directory: Path, request: bytes) -> None:
    """Print what a series and a sample cost Prometheus: memory and CPU."""
    parsed = ExportMetricsServiceRequest.FromString(request)
    samples: dict[str, list[float]] = {}
    began_ns = at_ns = time.time_ns() - (ROUNDS * len(NODES) * POINTS + 2) * INTERVAL_NS
    with started(directory, "prometheus", SERVICES["prometheus"]) as prometheus:
        at_ns += INTERVAL_NS
        port = prometheus.values["PROMETHEUS_PORT"]
        path = "/api/v1/otlp/v1/metrics"
        meter = Meter({"prometheus": prometheus})
        meter.look()
        before_bytes = meter.resident_bytes["prometheus"]
        post(port, path, from_nodes(points_at(parsed, began_ns, at_ns), max(NODES)), CONSUMERS, meter)
        series = said_by(prometheus, "prometheus_tsdb_head_series")
        assert series > 100 * max(NODES), series
        made_us = meter.spent_s()["prometheus"] / series * 1e6
        print(f"\nPrometheus: {series:,.0f} series of {max(NODES)} nodes, each made in {made_us:.0f} us")
        for nodes in NODES * ROUNDS:
            taken = said_by(prometheus, "prometheus_tsdb_head_samples_appended_total")
            round_meter = Meter({"prometheus": prometheus})
            for _ in range(POINTS):
                at_ns += INTERVAL_NS
                post(port, path, from_nodes(points_at(parsed, began_ns, at_ns), nodes), CONSUMERS, meter)
            taken = said_by(prometheus, "prometheus_tsdb_head_samples_appended_total") - taken
            samples.setdefault(f"{nodes} nodes", []).append(round_meter.spent_s()["prometheus"] / taken * 1e6)
        resident_bytes = meter.resident_bytes["prometheus"]
    table("Prometheus: CPU per sample", samples, f"{max(NODES)} nodes", {}, "us")
    print(
        f"{resident_bytes / 1e6:.0f} MB resident, {(resident_bytes - before_bytes) / series / 1e3:.1f} "
        "kB a series"
    )


def main() -> None:
    """Measure and print."""
    missing = [name for name in ("jaeger", "prometheus") if find(ENGINES[name]) is None]
    if missing:
        print(f"left out: {', '.join(missing)} not built here; build them: make engines")
        return
    print(machine())
    with TemporaryDirectory() as name:
        directory = Path(name)
        requests = captured(directory, SPAN_ROUNDS)
        measure_jaeger(directory, requests["/v1/traces"])
        measure_prometheus(directory, max(requests["/v1/metrics"], key=len))


if __name__ == "__main__":
    main()
