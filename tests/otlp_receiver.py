"""A real OTLP receiver for tests: gRPC and HTTP on loopback, ports of the system's choice. Keeps all that
arrives.

Nothing of the product is used here, so what a test reads was on the wire.
"""

from __future__ import annotations

import gzip
import socket
import threading
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

Attributes = dict[str, Any]
_REMOTE_FLAG = trace_pb2.SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


@dataclass(frozen=True)
class Link:
    trace_id: str
    span_id: str
    attributes: Attributes


@dataclass(frozen=True)
class Event:
    name: str
    time_ns: int
    attributes: Attributes


@dataclass(frozen=True)
class Span:
    """A span as it arrived; ids in hex, '' for no parent."""

    trace_id: str
    span_id: str
    parent_id: str
    parent_is_remote: bool
    name: str
    kind: str  # INTERNAL, PRODUCER, ...
    status: str  # UNSET, OK, ERROR
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: list[Event]
    links: list[Link]
    resource: Attributes
    scope: str
    encoded: bytes = field(repr=False)


@dataclass(frozen=True)
class Point:
    """A metric point as it arrived. `value` is a number's value, `count` and `total` are a histogram's."""

    name: str
    unit: str
    kind: str  # sum, gauge, histogram, exponential_histogram
    monotonic: bool
    cumulative: bool
    attributes: Attributes
    start_ns: int
    time_ns: int
    value: float
    count: int
    total: float
    resource: Attributes
    proto: Any = field(repr=False)


class OtlpReceiver:
    """Context manager. `down` makes both ports refuse each request (UNAVAILABLE, 503), which exporters retry;
        those that `refuses` says are refused for good (INVALID_ARGUMENT, 400), and those of more than `bytes_max`
    bytes are too large (RESOURCE_EXHAUSTED, 413)."""

    def __init__(self, host: str = "127.0.0.1", bytes_max: int = 4 << 20) -> None:
        self.bytes_max = bytes_max  # gRPC's default
        self.down = False
        self.refuses: Callable[[Any], bool] = lambda request: False
        self.requests: list[
            dict[str, str]
        ] = []  # headers of each accepted request, keys in lower case, "protocol" added
        self._host = host
        self._changed = threading.Condition()
        self._spans: list[Span] = []
        self._points: list[Point] = []
        self._grpc = grpc.server(
            ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", bytes_max)]
        )
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._grpc)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._grpc)
        self._grpc_port = self._grpc.add_insecure_port(f"{host}:0")
        self._http = ThreadingHTTPServer((host, 0), _Handler)
        self._http.daemon_threads = True
        self._http.receiver = self  # type: ignore[attr-defined]
        self._http_thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def grpc_endpoint(self) -> str:
        return f"http://{self._host}:{self._grpc_port}"

    @property
    def http_endpoint(self) -> str:
        return f"http://{self._host}:{self._http.server_port}"

    def environment(self, protocol: str) -> dict[str, str]:
        """Return the variables that send to this receiver by 'grpc' or 'http/protobuf'."""
        endpoint = self.grpc_endpoint if protocol == "grpc" else self.http_endpoint
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}

    def __enter__(self) -> OtlpReceiver:
        self._grpc.start()
        self._http_thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._grpc.stop(None).wait()
        self._http.shutdown()
        self._http.server_close()
        self._http_thread.join()

    # -- what arrived --------------------------------------------------------

    def spans(self) -> list[Span]:
        """Return every span in order of arrival, a repeated one as often as it came."""
        with self._changed:
            return list(self._spans)

    def span_ids(self) -> set[str]:
        return {span.span_id for span in self.spans()}

    def clear(self) -> None:
        with self._changed:
            self._spans.clear()
            self._points.clear()
            self.requests.clear()

    def points(self, name: str | None = None, attributes: Mapping[str, Any] | None = None) -> list[Point]:
        """Return metric points in order of arrival: of that name, and with at least these attributes."""
        wanted = (attributes or {}).items()
        with self._changed:
            return [
                point
                for point in self._points
                if name in (None, point.name) and wanted <= point.attributes.items()
            ]

    def latest(self, name: str, attributes: Mapping[str, Any] | None = None) -> list[Point]:
        """Return the newest point of each series of a metric."""
        newest: dict[tuple[Any, ...], Point] = {}
        for point in self.points(name, attributes):
            key = tuple(sorted(point.attributes.items())), tuple(sorted(point.resource.items()))
            if key not in newest or point.time_ns >= newest[key].time_ns:
                newest[key] = point
        return list(newest.values())

    def wait_for(self, condition: Callable[[OtlpReceiver], Any], timeout_s: float = 10.0) -> bool:
        """Return whether `condition(self)` came true in time; it is looked at after each request."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: condition(self), timeout_s))

    def tree(self, leave_out: Collection[str] = ()) -> list[dict[str, Any]]:
        """Return `tree` of the distinct spans that arrived."""
        return tree(self.spans(), leave_out)

    # -- called by the services ----------------------------------------------

    def store_spans(
        self, request: trace_service_pb2.ExportTraceServiceRequest, headers: dict[str, str]
    ) -> None:
        found = spans_of(request)
        with self._changed:
            self._spans += found
            self.requests.append(headers)
            self._changed.notify_all()

    def store_metrics(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, headers: dict[str, str]
    ) -> None:
        found = [
            point
            for resource_metrics in request.resource_metrics
            for scope_metrics in resource_metrics.scope_metrics
            for metric in scope_metrics.metrics
            for point in _points(metric, _attributes(resource_metrics.resource.attributes))
        ]
        with self._changed:
            self._points += found
            self.requests.append(headers)
            self._changed.notify_all()


class SilentServer:
    """A black hole: accepts every connection and never answers. Context manager."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._accepted = threading.Condition()
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connections(self) -> int:
        with self._accepted:
            return len(self._connections)

    def wait_for_connection(self, timeout_s: float = 10.0) -> bool:
        with self._accepted:
            return self._accepted.wait_for(lambda: bool(self._connections), timeout_s)

    def __enter__(self) -> SilentServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._accepted:
                self._connections.append(connection)
                self._accepted.notify_all()


def spans_of(request: trace_service_pb2.ExportTraceServiceRequest) -> list[Span]:
    """Return the spans of a request in order."""
    return [
        _span(span, _attributes(resource_spans.resource.attributes), scope_spans.scope.name)
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def tree(spans: list[Span], leave_out: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return spans as one literal to compare: roots and children by start, without ids and times; empty
    entries left out.

    A link and a remote parent name their span "name#n", n counting the spans of that name by start, or "?"
    when it did not arrive. A child lies under its parent whatever its process. Attributes in `leave_out` are
    left out everywhere.
    """
    distinct = sorted(
        {span.span_id: span for span in spans}.values(),
        key=lambda span: (span.start_ns, -span.end_ns, span.span_id),
    )
    labels: dict[tuple[str, str], str] = {}
    counts: dict[str, int] = {}
    children: dict[tuple[str, str], list[Span]] = {}
    for span in distinct:
        number = counts[span.name] = counts.get(span.name, -1) + 1
        labels[span.trace_id, span.span_id] = f"{span.name}#{number}"
    for span in distinct:
        parent = (span.trace_id, span.parent_id)
        children.setdefault(parent if parent in labels else ("", ""), []).append(span)

    def keep(attributes: Attributes) -> Attributes:
        return {key: value for key, value in attributes.items() if key not in leave_out}

    def node(span: Span) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "name": span.name,
            "service": span.resource["service.name"] if not span.parent_id or span.parent_is_remote else "",
            "kind": "" if span.kind == "INTERNAL" else span.kind,
            "status": "" if span.status == "UNSET" else span.status,
            "remote_parent": labels.get((span.trace_id, span.parent_id), "?")
            if span.parent_is_remote
            else "",
            "lost_parent": span.parent_id != "" and (span.trace_id, span.parent_id) not in labels,
            "attributes": keep(span.attributes),
            "events": [(event.name, keep(event.attributes)) for event in span.events],
            "links": [
                (labels.get((link.trace_id, link.span_id), "?"), keep(link.attributes)) for link in span.links
            ],
            "children": [node(child) for child in children.get((span.trace_id, span.span_id), [])],
        }
        return {key: value for key, value in entry.items() if value}

    return [node(root) for root in children.get(("", ""), [])]


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  gRPC's name
        self._receiver.store_spans(request, _accept(self._receiver, request, context))
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  gRPC's name
        self._receiver.store_metrics(request, _accept(self._receiver, request, context))
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _accept(receiver: OtlpReceiver, request: Any, context: grpc.ServicerContext) -> dict[str, str]:
    """Return a request's headers; when the receiver is down this raises out of the call."""
    if receiver.down:
        context.abort(grpc.StatusCode.UNAVAILABLE, "the receiver is down")
    if receiver.refuses(request):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the receiver does not take that")
    return {"protocol": "grpc", **{str(key): str(value) for key, value in context.invocation_metadata()}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body of an answer are two writes: else the second waits 40 ms
    timeout = 30

    def do_POST(self) -> None:
        receiver: OtlpReceiver = self.server.receiver  # type: ignore[attr-defined]
        if "Content-Length" not in self.headers:
            return self._answer(411, b"no length")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if receiver.down:
            return self._answer(503, b"the receiver is down")
        encoding = self.headers.get("Content-Encoding", "")
        body = (
            gzip.decompress(body)
            if encoding == "gzip"
            else zlib.decompress(body)
            if encoding == "deflate"
            else body
        )
        headers = {"protocol": "http/protobuf", **{key.lower(): value for key, value in self.headers.items()}}
        kinds = {
            "/v1/traces": (trace_service_pb2.ExportTraceServiceRequest, receiver.store_spans),
            "/v1/metrics": (metrics_service_pb2.ExportMetricsServiceRequest, receiver.store_metrics),
        }
        if self.path not in kinds:
            return self._answer(404, b"no such signal")
        if len(body) > receiver.bytes_max:
            return self._answer(413, b"the request is too large")
        kind, store = kinds[self.path]
        request = kind.FromString(body)
        if receiver.refuses(request):
            return self._answer(400, b"the receiver does not take that")
        store(request, headers)
        return self._answer(200, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _value(value: common_pb2.AnyValue) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    if which == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, which) if which else None


def _attributes(pairs: Any) -> Attributes:
    found = {pair.key: _value(pair.value) for pair in pairs}
    assert len(found) == len(pairs), f"an attribute came twice: {[pair.key for pair in pairs]}"
    return found


def _span(span: trace_pb2.Span, resource: Attributes, scope: str) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        parent_is_remote=bool(span.flags & _REMOTE_FLAG),
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[
            Event(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events
        ],
        links=[
            Link(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in span.links
        ],
        resource=resource,
        scope=scope,
        encoded=span.SerializeToString(deterministic=True),
    )


def _points(metric: Any, resource: Attributes) -> list[Point]:
    kind = metric.WhichOneof("data")
    data = getattr(metric, kind)
    return [
        Point(
            name=metric.name,
            unit=metric.unit,
            kind=kind,
            monotonic=getattr(data, "is_monotonic", False),
            cumulative=getattr(data, "aggregation_temporality", 0) == 2,
            attributes=_attributes(point.attributes),
            start_ns=point.start_time_unix_nano,
            time_ns=point.time_unix_nano,
            value=getattr(point, point.WhichOneof("value")) if hasattr(point, "as_int") else 0,
            count=getattr(point, "count", 0),
            total=getattr(point, "sum", 0.0),
            resource=resource,
            proto=point,
        )
        for point in data.data_points
    ]
