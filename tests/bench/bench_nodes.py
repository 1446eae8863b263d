"""What a collector costs per span, by tier and by how many nodes send to it: one recording, replayed as 1, 4,
16 and 64 nodes at once.

Run: python tests/bench/bench_nodes.py     (about four minutes; the engines must be built: make engines)

The nodes send the same spans, each under a name of its own and one request at a time, in the very requests of
an agent: 128 of them from one node, 32 from each of several. CPU is what the kernel charged the collector
from the first request until the last span has left it; memory is its largest resident set in the first round,
as the nodes become more. The sink counts spans and keeps none.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
from bench_agent import record
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from timing import machine, table

from otel_dflash.session import create_session, remove_session
from otel_dflash.stack.engines import ENGINES, find
from otel_dflash.stack.services import SERVICES, Service
from tests.stack.conftest import Started
from tests.stack.kafka_broker import KafkaBroker
from tests.stack.kafka_build import KAFKA
from tests.stack.nodes import GATEWAY, KAFKA_GATEWAY, KAFKA_NODE

NODES = (1, 4, 16, 64)
ROUNDS = 3
REQUESTS = 128  # of all nodes together in each round, but ...
REQUESTS_PER_NODE_MIN = 32  # ... at least so many of each
NAME = "node-000"  # as long as every other node's, so that it can be replaced in an encoded request
DEADLINE_S = 120.0
LOOK_S = 0.02
PACE = 42_000  # spans/s: a third of what 1 000 ranks make
PACED_REQUESTS = 600

SINK = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
count, size, lock = 0, 0, threading.Lock()
def add(request):
    global count
    with lock:
        count += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
class Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request, context):
        add(request)
        return trace_service_pb2.ExportTraceServiceResponse()
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        global size
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with lock:
            size += len(body)
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            add(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
        self.answer(b"")
    def do_GET(self):
        self.answer(f"{count} {size}".encode())
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
server = grpc.server(ThreadPoolExecutor(4))
trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
web.daemon_threads = True
print(port, web.server_port, flush=True)
web.serve_forever()
"""


class Sink:
    """Takes spans by both protocols in a process of its own, and counts them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        grpc_port, self._port = self._process.stdout.readline().split()
        self.grpc = f"[127.0.0.1:{grpc_port}]"
        self.http = f"http://127.0.0.1:{self._port}"

    def spans(self) -> int:
        """Return how many spans came so far."""
        return self._read()[0]

    def http_bytes(self) -> int:
        """Return how many bytes of requests came by HTTP so far."""
        return self._read()[1]

    def _read(self) -> tuple[int, int]:
        with closing(http.client.HTTPConnection("127.0.0.1", int(self._port))) as connection:
            connection.request("GET", "/")
            spans, size = connection.getresponse().read().split()
            return int(spans), int(size)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class Meter:
    """CPU and memory of collectors over a round."""

    def __init__(self, collectors: dict[str, Started]) -> None:
        self._processes = {
            name: psutil.Process(collector.process.pid)
            for name, collector in collectors.items()
            if collector.process
        }
        self._before = {name: self._cpu_s(process) for name, process in self._processes.items()}
        self.resident_bytes = dict.fromkeys(self._processes, 0)

    def look(self) -> None:
        """Take a reading of the memory."""
        for name, process in self._processes.items():
            self.resident_bytes[name] = max(self.resident_bytes[name], process.memory_info().rss)

    def watch(self, threads: list[threading.Thread]) -> None:
        """Run the threads to their end, and take readings meanwhile."""
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                self.look()
                thread.join(LOOK_S)

    def spent_s(self) -> dict[str, float]:
        """Return the CPU time of each since the start."""
        return {name: self._cpu_s(process) - self._before[name] for name, process in self._processes.items()}

    @staticmethod
    def _cpu_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)


def captured(directory: Path, rounds: int) -> dict[str, list[bytes]]:
    """Record a run of 8 workers with 32,000 spans a round; return what a replay of it sends, from the node
    NAME: OTLP requests by path."""
    os.environ["OTEL_DFLASH_NODE"] = NAME
    session = create_session("bench", directory)
    try:
        record(session, rounds)
    finally:
        remove_session(session)
    found: dict[str, list[bytes]] = {}

    class Keep(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.setdefault(self.path, []).append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Keep) as server:
        threading.Thread(target=server.serve_forever).start()
        command = [
            sys.executable,
            "-m",
            "otel_dflash",
            "replay",
            str(session.recording),
            "--protocol",
            "http/protobuf",
        ]
        subprocess.run(
            [*command, "--endpoint", f"http://127.0.0.1:{server.server_port}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        server.shutdown()
    assert all(NAME.encode() in request for requests in found.values() for request in requests)
    return found


def spans_in(requests: list[bytes]) -> int:
    """Return how many spans the requests hold."""
    parsed = map(ExportTraceServiceRequest.FromString, requests)
    return sum(
        len(scope.spans)
        for request in parsed
        for resource in request.resource_spans
        for scope in resource.scope_spans
    )


def send(port: str, requests: list[bytes], nodes: int, meter: Meter) -> None:
    """Send all of the requests from each of so many nodes, which send at once."""
    failures = []

    def work(node: int) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", int(port))) as connection:
            for request in requests:
                body = request.replace(NAME.encode(), f"node-{node:03}".encode())
                connection.request("POST", "/v1/traces", body, {"Content-Type": "application/x-protobuf"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    failures.append(answer.status)

    threads = [threading.Thread(target=work, args=(node,)) for node in range(nodes)]
    meter.watch(threads)
    assert not failures, failures


def measure(
    title: str, entry: Started, collectors: dict[str, Started], sink: Sink, requests: list[bytes]
) -> None:
    """Print CPU per span and memory of each collector on the way from `entry` to the sink."""
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in collectors}
    resident: dict[str, dict[str, int]] = {name: {} for name in collectors}
    one_round(entry, collectors, sink, requests, 1)  # warms up
    for nodes in NODES * ROUNDS:
        variant = f"{nodes} node{'s' * (nodes > 1)}"
        share = requests[: max(REQUESTS // nodes, REQUESTS_PER_NODE_MIN)]
        meter = one_round(entry, collectors, sink, share, nodes)
        for name, spent_s in meter.spent_s().items():
            # later, one node would be charged what 64 took
            resident[name].setdefault(variant, meter.resident_bytes[name])
            samples[name].setdefault(variant, []).append(spent_s / (nodes * spans_in(share)) * 1e6)
    for name, variants in samples.items():
        notes = {
            variant: (
                f"{1e6 / (sum(values) / len(values)):,.0f} spans/s per core, "
                f"{resident[name][variant] / 1e6:.0f} MB"
            )
            for variant, values in variants.items()
        }
        table(f"{title}: CPU per span of {name}", variants, "1 node", notes, "us")


def pace(entry: Started, requests: list[bytes]) -> None:
    """Print the memory of a new collector while one node sends spans at PACE."""
    meter = Meter({"collector": entry})
    spans = 0
    began_s = time.monotonic()
    with closing(
        http.client.HTTPConnection("127.0.0.1", int(entry.values["OTELCOL_HTTP_PORT"]))
    ) as connection:
        for request in (requests * PACED_REQUESTS)[:PACED_REQUESTS]:
            connection.request("POST", "/v1/traces", request, {"Content-Type": "application/x-protobuf"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            spans += spans_in([request])
            time.sleep(max(0.0, spans / PACE - (time.monotonic() - began_s)))
            meter.look()
    rate = spans / (time.monotonic() - began_s)
    print(
        f"\n{entry.service.name} at {rate:,.0f} spans/s as they come: "
        f"{meter.resident_bytes['collector'] / 1e6:.0f} MB"
    )


def one_round(
    entry: Started, collectors: dict[str, Started], sink: Sink, requests: list[bytes], nodes: int
) -> Meter:
    """Send all of the requests from each node, and wait until all spans came; return what that took."""
    wanted = sink.spans() + nodes * spans_in(requests)
    meter = Meter(collectors)
    send(entry.values["OTELCOL_HTTP_PORT"], requests, nodes, meter)
    deadline = time.monotonic() + DEADLINE_S
    while sink.spans() < wanted:
        assert time.monotonic() < deadline, f"{wanted - sink.spans()} spans did not arrive"
        meter.look()
        time.sleep(LOOK_S)
    return meter


@contextmanager
def started(directory: Path, name: str, service: Service, **variables: str) -> Iterator[Started]:
    """Run a service on free ports."""
    one = Started(service, directory / name, variables).start()
    try:
        yield one
    finally:
        if one.process:
            one.kill()


def main() -> None:
    """Measure and print."""
    if find(ENGINES["otelcol"]) is None:
        print("left out: otelcol is not built here; build it: make engines")
        return
    print(machine())
    with TemporaryDirectory() as name, ExitStack() as entered:
        directory = Path(name)
        requests = captured(directory, 4)["/v1/traces"][:REQUESTS]
        assert len(requests) == REQUESTS, len(requests)
        spans = spans_in(requests)
        per_span = sum(map(len, requests)) / spans
        print(
            f"{spans:,} spans of one node in {len(requests)} requests, {per_span:.0f} bytes a span as "
            "the agent sends it"
        )
        sink = Sink()
        entered.callback(sink.close)
        to_sink = {"OTELCOL_TRACES_ENDPOINT": sink.http, "OTELCOL_METRICS_ENDPOINT": sink.http}
        with started(directory, "node", SERVICES["otelcol"], **to_sink) as node:
            pace(node, requests)
            measure("node tier, otelcol.yaml", node, {"otelcol": node}, sink, requests)
            print(
                f"{sink.http_bytes() / sink.spans():.0f} bytes a span as the collector sends it, compressed"
            )
        backends = {"GATEWAY_BACKENDS": sink.grpc, "OTELCOL_METRICS_ENDPOINT": sink.http}
        with started(directory, "gateway", GATEWAY, **backends) as gateway:
            pace(gateway, requests)
            measure("cluster tier, gateway.yaml", gateway, {"otelcol": gateway}, sink, requests)
        if find(KAFKA) is None:
            print("\nkafka is not built here; build it: make engines")
            return
        kafka = entered.enter_context(KafkaBroker(directory / "kafka"))
        with (
            started(
                directory, "kafka-gateway", KAFKA_GATEWAY, KAFKA_BROKERS=kafka.brokers, **to_sink
            ) as gateway,
            started(directory, "kafka-node", KAFKA_NODE, KAFKA_BROKERS=kafka.brokers) as node,
        ):
            measure(
                "over Kafka", node, {"kafka-node.yaml": node, "kafka-gateway.yaml": gateway}, sink, requests
            )


if __name__ == "__main__":
    main()
