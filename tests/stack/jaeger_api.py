"""Jaeger's query APIs, as a user calls them over HTTP, with the answers as the tests' own Span."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from tests.otlp_receiver import Span, spans_of

_EPOCH = "1970-01-01T00:00:00Z"
_FAR = "2100-01-01T00:00:00Z"
_TRACES_MAX = 1_000_000
_IDS = {"traceId", "spanId", "parentSpanId"}
_WARNINGS = "@jaeger@warnings"


class Jaeger:
    """One Jaeger by the URL of its query port. Two APIs: v3 answers whole spans, the one of the UI (/api)
    also searches by attribute."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of an answer.

        Raises:
            HTTPError: It is not 200.
        """
        with self._opener.open(f"{self.url}{path}?{urlencode(query, doseq=True)}", timeout=60) as answer:
            return json.load(answer)

    # -- API v3 --------------------------------------------------------------

    def services(self) -> list[str]:
        return sorted(self.get("/api/v3/services")["services"])

    def operations(self, service: str) -> list[str]:
        return sorted(
            operation["name"] for operation in self.get("/api/v3/operations", service=service)["operations"]
        )

    def trace(self, trace_id: str) -> list[Span]:
        return _spans(self.get(f"/api/v3/traces/{trace_id}"))

    def spans(self, service: str, **query: Any) -> list[Span]:
        """Return all spans of the traces in which `service` has one; `query` is of API v3, such as
        operation_name, duration_min."""
        return _spans(self._find(service, query))

    def span_ids(self, services: Iterable[str]) -> set[str]:
        """Return the ids of all spans of the traces in which one of `services` has one; much cheaper than
        `spans`."""
        found = [
            resource
            for service in services
            for resource in self._find(service, {})["result"]["resourceSpans"]
        ]
        return {
            span["spanId"]
            for resource in found
            for scope in resource["scopeSpans"]
            for span in scope.get("spans", ())
        }

    def _find(self, service: str, query: dict[str, Any]) -> Any:
        wanted = {
            "service_name": service,
            "start_time_min": _EPOCH,
            "start_time_max": _FAR,
            "num_traces": _TRACES_MAX,
            **query,
        }
        try:
            return self.get("/api/v3/traces", **{f"query.{name}": value for name, value in wanted.items()})
        except HTTPError as error:
            if error.code == 404:  # v3 for none found
                return {"result": {"resourceSpans": []}}
            raise

    # -- the API of the UI ---------------------------------------------------

    def search(self, service: str, limit: int = 100_000, **query: Any) -> list[dict[str, Any]]:
        """Return traces as the UI gets them, the newest first; `tags` is a dict of texts."""
        if "tags" in query:
            query["tags"] = json.dumps(query["tags"])
        found: list[dict[str, Any]] = self.get("/api/traces", service=service, limit=limit, **query)["data"]
        return found

    def warnings(self, service: str) -> dict[str, list[str]]:
        """Return what Jaeger has to say about spans in the traces of a service, by both APIs: name of the
        span -> texts."""
        found: dict[str, list[str]] = {}
        for trace in self.search(service):
            for span in trace["spans"]:
                for text in span["warnings"] or ():
                    found.setdefault(span["operationName"], []).append(text)
        for one in self.spans(service):
            for text in one.attributes.get(_WARNINGS, ()):
                found.setdefault(one.name, []).append(text)
        return found


def _spans(answer: dict[str, Any]) -> list[Span]:
    """Return the spans of an answer of API v3: OTLP's JSON, in which ids are hex where protobuf's JSON has
    base64."""
    request = trace_service_pb2.ExportTraceServiceRequest()
    json_format.ParseDict(_with_base64_ids(answer["result"]), request)
    return spans_of(request)


def _with_base64_ids(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_base64_ids(item) for item in node]
    if isinstance(node, dict):
        return {
            key: base64.b64encode(bytes.fromhex(value)).decode() if key in _IDS else _with_base64_ids(value)
            for key, value in node.items()
        }
    return node
