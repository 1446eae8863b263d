"""The doctor's check of the path as tests use it, and servers that misbehave in ways the doctor must name."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import grpc
import pytest

from otel_dflash.cli.doctor_command import prepare
from otel_dflash.doctor.delivery_path import DeliveryPath
from tests.processes import clean_environment

GRPC = "grpc"
HTTP = "http/protobuf"
BUSY_S = 10
"""What a machine busy with other work may add to a time limit. Without the limit the check has no end."""


class Doctor:
    """Checks the path in this process, in an environment without any setting but those given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.took_s = 0.0

    def __call__(
        self,
        endpoint: str | None,
        protocol: str = GRPC,
        *,
        jaeger: str | None = None,
        prometheus: str | None = None,
        timeout_s: float = 5.0,
        **variables: str,
    ) -> list[str]:
        """Return the lines as "STATUS check: text", ids and ports made the same."""
        with self._monkeypatch.context() as patch:
            for name in list(os.environ):
                if name.startswith("OTEL_") or name.endswith("_CA_BUNDLE") or name.lower().endswith("_proxy"):
                    patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            before = dict(os.environ)
            start = time.monotonic()
            try:
                prepare(endpoint, protocol)
                path = DeliveryPath(os.environ, jaeger, prometheus, timeout_s)
                lines = list(path.check())
            finally:
                os.environ.clear()
                os.environ.update(before)
            self.took_s = time.monotonic() - start
        return [normal(f"{line.status.value} {line.check}: {line.text}") for line in lines]


def run_doctor(directory: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run `otel-dflash doctor` in a directory with no setting of the SDK but those given; return exit code,
    stdout, stderr."""
    foreign = re.compile(r"OTEL_(?!DFLASH_).*|.*_(proxy|PROXY)")
    kept = {name: value for name, value in os.environ.items() if not foreign.fullmatch(name)}
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XDG_STATE_HOME": str(directory),
        **variables,
    }
    command = [sys.executable, "-m", "otel_dflash", "doctor", *arguments]
    result = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return result.returncode, result.stdout, result.stderr


def alone(
    namespace: str, program: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python as root of a namespace ("--mount", "--net") of its own; where this machine allows none, the
    test is skipped."""
    own_user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *own_user, namespace, sys.executable, "-c", program, *arguments]
    result = subprocess.run(
        command, env=clean_environment(**variables), capture_output=True, text=True, timeout=60, check=False
    )
    if result.returncode and result.stderr.startswith(("unshare:", "cannot mount:")):
        pytest.skip(f"this machine allows no namespace of our own: {result.stderr.strip()}")
    return result


def normal(text: str) -> str:
    """Return text with every port and trace id replaced."""
    return re.sub(r"\b[0-9a-f]{32}\b", "ID", re.sub(r":\d{4,5}\b", ":PORT", text))


def wrong(lines: list[str]) -> list[str]:
    """Return what is wrong, without the word."""
    return [line.removeprefix("WRONG ") for line in lines if line.startswith("WRONG ")]


@contextmanager
def busy(endpoint: str) -> Iterator[None]:
    """Send spans to an OTLP receiver of HTTP all the time."""
    span = {"traceId": "b" * 32, "spanId": "b" * 16, "name": "busy"}
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()
    request = urllib.request.Request(f"{endpoint}/v1/traces", body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    ended = threading.Event()

    def send() -> None:
        while not ended.wait(0.1):
            opener.open(request, timeout=10).close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        assert thread.is_alive(), "it was refused"
        ended.set()
        thread.join()


def closed_port() -> int:
    """Return a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class HttpServer:
    """A real HTTP server that answers every request with one status, by a clock that may be off. Context
    manager.

    With `is_silent` it takes what is sent to it, and never answers.
    """

    def __init__(
        self,
        status: int = 200,
        offset_s: float = 0,
        tls: ssl.SSLContext | None = None,
        body: bytes = b"",
        is_silent: bool = False,
    ) -> None:
        self._ended = ended = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response_only(status)
                self.send_header("Date", formatdate(time.time() + offset_s, usegmt=True))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                if is_silent:
                    ended.wait()
                else:
                    self.answer()

            do_GET = answer  # noqa: N815  http.server's name

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        if tls:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HttpServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that speak another language."""


class _Refusing(grpc.GenericRpcHandler):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(self._code, "planted")
            return b""

        return grpc.unary_unary_rpc_method_handler(refuse)


@contextmanager
def grpc_server(
    code: grpc.StatusCode | None = None, credentials: grpc.ServerCredentials | None = None
) -> Iterator[str]:
    """Give the URL of a gRPC server that refuses every call with a code, or knows no service."""
    server = grpc.server(ThreadPoolExecutor(2))
    if code:
        server.add_generic_rpc_handlers((_Refusing(code),))
    port = (
        server.add_secure_port("127.0.0.1:0", credentials)
        if credentials
        else server.add_insecure_port("127.0.0.1:0")
    )
    server.start()
    try:
        yield f"{'https' if credentials else 'http'}://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def banner_server(banner: bytes) -> Iterator[str]:
    """Give the URL of a server that says something of its own and closes, as one of SSH does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(banner)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


@contextmanager
def dripping_server(first: bytes) -> Iterator[str]:
    """Give the URL of a server that says `first`, and then a byte every 0.4 s."""
    ended = threading.Event()

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(first)
            with suppress(OSError):
                while not ended.wait(0.4):
                    self.request.sendall(b"x")

    class Server(ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()
            thread.join()


@contextmanager
def full_listener() -> Iterator[str]:
    """Give the URL of a port that takes no more connections and does not refuse them: packets vanish as
    behind a firewall."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        held = []
        try:
            for _ in range(4):
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(listener.getsockname())
                held.append(one)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for one in held:
                one.close()


def server_context(
    pair: tuple[str, str],
    client_authority: str | None = None,
    newest: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED,
) -> ssl.SSLContext:
    """Return the TLS of an HTTP server; with `client_authority` it wants clients to show a certificate of
    that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = newest
    context.load_cert_chain(*pair)
    if client_authority:
        context.load_verify_locations(client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def server_credentials(pair: tuple[str, str], client_authority: str | None = None) -> grpc.ServerCredentials:
    """Return the same for a gRPC server."""
    certificate, key = (Path(name).read_bytes() for name in pair)
    if client_authority:
        return grpc.ssl_server_credentials(
            [(key, certificate)], Path(client_authority).read_bytes(), require_client_auth=True
        )
    return grpc.ssl_server_credentials([(key, certificate)])
