"""The stack where a proxy stands between this host and the others: what stays here goes past it, what leaves
goes through it."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from otel_dflash.cli.environment import with_stack
from otel_dflash.stack.control import Addresses
from otel_dflash.stack.services import around_proxies
from tests.processes import poll
from tests.stack.host import TRAINER, Host
from tests.stack.jaeger_api import Jaeger


class Proxy:
    """A proxy that notes what it is asked, and answers as an OTLP backend that took all. Context manager."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                proxy.asked.add(f"{self.command} {self.path}")
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST = do_CONNECT = answer  # noqa: N815  http.server's names

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_backend_elsewhere_is_reached_by_the_proxy_and_what_is_on_this_host_without(
    protocol: str, engines: Host
) -> None:
    """Agent -> localhost -> 0.0.0.0, which Go does not take for a loopback address; metrics go elsewhere."""
    with Proxy() as proxy:
        variables = {
            "OTELCOL_HOST": "localhost",
            "JAEGER_HOST": "0.0.0.0",
            "OTELCOL_METRICS_ENDPOINT": "http://metrics.invalid:9009/otlp",
            "http_proxy": proxy.url,
            "no_grpc_proxy": "elsewhere.invalid",
            "OTEL_DFLASH_EXIT_MS": "30000",
        }
        command = ["run", "--stack", "--protocol", protocol, "--quiet", "--", sys.executable, "-c", TRAINER]
        assert engines.run(*command, **variables)[0] == 0
        jaeger = Jaeger(f"http://127.0.0.1:{engines.ports['JAEGER_QUERY_HTTP_PORT']}")
        poll(lambda: jaeger.get("/api/services")["data"] == ["dflash-target"])
        poll(lambda: proxy.asked)
        assert proxy.asked == {"POST http://metrics.invalid:9009/otlp/v1/metrics"}


def test_what_a_user_keeps_from_the_proxy_stays_kept_from_it() -> None:
    environment = {
        "HTTP_PROXY": "http://proxy:3128",
        "NO_PROXY": "one.example",
        "no_proxy": "two.example",
        "PATH": "/bin",
    }
    around = "one.example,two.example,10.0.0.5"
    assert around_proxies(environment, ["10.0.0.5"]) == {
        **environment,
        "NO_PROXY": around,
        "no_proxy": around,
    }
    stack = Addresses({"OTLP over gRPC": "http://10.0.0.5:4317"}, has_ui=False)
    assert with_stack(environment, stack, None)["no_proxy"] == around
