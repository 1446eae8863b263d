"""Raw sockets: does something listen, does it speak TLS, and does it speak gRPC or HTTP. Each call ends by
its deadline.

gRPC is recognised by its first frame, HTTP/2's settings, which both sides send at once; HTTP/1 by its status
line. A server that is addressed in the wrong protocol closes the connection, answers in its own, or sends a
TLS alert.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from otel_dflash.doctor.finding import HopError
from otel_dflash.doctor.route import Credentials, Protocol
from otel_dflash.otlp.credentials import GRPC_ROOTS_VARIABLE

Address = tuple[socket.AddressFamily, Any]
Result = TypeVar("Result")

PROBE_S: Final = 3.0  # a server that takes longer for one step counts as silent
_SETTINGS_FRAME: Final = 4
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0))
_ANSWER_BYTES_MAX: Final = 4096


class Speaks(Enum):
    """What a server speaks."""

    GRPC = "gRPC"
    HTTP = "HTTP"
    OTHER = "neither gRPC nor HTTP"
    NOTHING = "nothing: it closed the connection"
    SILENT = "nothing"


class Answer(NamedTuple):
    """How a server answered, and the first bytes of its answer."""

    speaks: Speaks
    start: bytes = b""


def within(timeout_s: float, call: Callable[[], Result]) -> Result:
    """Return what `call` returns. A name lookup has no timeout of its own, and http.client's starts anew with
    each byte.

    Raises:
        TimeoutError: `call` has not returned within `timeout_s`; its thread is left behind.
        OSError, ValueError, http.client.HTTPException: `call` raised it.
    """
    results: list[Result] = []
    failures: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except (OSError, ValueError, http.client.HTTPException) as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError
    return results[0]


def resolve(host: str, port: int, timeout_s: float) -> list[Address]:
    """Return the addresses of a name, in the order to try them.

    Raises:
        HopError: The name has no address, or the name service does not answer.
    """
    try:
        found = within(timeout_s, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except TimeoutError:
        raise HopError(
            f"the name service does not resolve {host!r} within {timeout_s:.2g} s; check /etc/resolv.conf"
        ) from None
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a host name"
        raise HopError(
            f"the name {host!r} has no address here ({reason}); fix the endpoint, or DNS or /etc/hosts"
        ) from None
    return [(family, address) for family, *_, address in found]


def connect(addresses: list[Address], timeout_s: float) -> tuple[socket.socket, Address]:
    """Return a connection to the first address that accepts one, and that address.

    Raises:
        OSError: No address accepts one; the error is that of the last, TimeoutError when nothing answers.
    """
    failure: OSError = TimeoutError()
    for family, address in addresses:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(timeout_s / len(addresses))
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
            continue
        return connection, (family, address)
    raise failure


def handshake(
    connection: socket.socket, host: str, protocol: Protocol, credentials: Credentials | None
) -> ssl.SSLSocket:
    """Return the connection after a TLS handshake. Without `credentials` any server is trusted.

    Raises:
        HopError: A file of TLS cannot be read.
        ssl.SSLError: The server does not speak TLS, or one side does not trust the other.
        OSError: The server closes the connection, or does not answer.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if credentials is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        _load(context, protocol, credentials)
    context.set_alpn_protocols(["h2"] if protocol == "gRPC" else ["http/1.1"])
    return context.wrap_socket(connection, server_hostname=host)


def ask(connection: socket.socket, host: str, path: str, protocol: Protocol) -> Answer:
    """Send the first bytes of a protocol and return the answer.

    Raises:
        ssl.SSLError: The server refuses this client's certificate, or wants one (TLS 1.3 reports it late).
    """
    hello = (
        _PREFACE
        if protocol == "gRPC"
        else f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    )
    start = b""
    deadline = time.monotonic() + (connection.gettimeout() or PROBE_S)
    try:
        connection.sendall(hello)
        while len(start) < _ANSWER_BYTES_MAX and not _is_enough(start):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(_ANSWER_BYTES_MAX)
            if not part:
                break
            start += part
    except TimeoutError:
        return Answer(_speaks(start, Speaks.SILENT), start)
    except ssl.SSLError:
        raise
    except OSError:  # reset: the server refuses what it was sent
        return Answer(_speaks(start, Speaks.NOTHING), start)
    return Answer(_speaks(start, Speaks.NOTHING), start)


def look_again(address: Address, host: str, timeout_s: float) -> tuple[bool, Speaks] | None:
    """Return (whether TLS, what it speaks) of a server, found by trying all four combinations; None when none
    fits.

    A server with TLS answers NOTHING to a client without the right certificate.
    """
    deadline = time.monotonic() + timeout_s
    protocols: tuple[Protocol, ...] = ("gRPC", "HTTP")
    has_tls = False
    for tls in (False, True):
        for protocol in protocols:
            try:
                connection, _ = connect([address], max(0.05, min(PROBE_S, deadline - time.monotonic())))
                with connection:
                    secured = handshake(connection, host, protocol, None) if tls else connection
                    has_tls |= tls
                    with secured:
                        answer = ask(secured, host, "/", protocol)
            except ssl.SSLError as error:
                if is_about_certificates(error):
                    return True, Speaks.NOTHING
                continue
            except OSError:
                continue
            if answer.speaks.value == protocol:
                return tls, answer.speaks
    return (True, Speaks.NOTHING) if has_tls else None


def is_about_certificates(error: ssl.SSLError) -> bool:
    """Return whether an error means that both sides speak TLS, but one does not trust the other."""
    signs = ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE", "ACCESS_DENIED", "DECRYPT_ERROR")
    return any(sign in (error.reason or "") for sign in signs)


def _load(context: ssl.SSLContext, protocol: Protocol, credentials: Credentials) -> None:
    """Load what the exporter trusts, and the client's certificate."""
    ca = credentials.ca or _default_roots(protocol)
    try:
        if Path(ca).is_dir():
            context.load_verify_locations(capath=ca)
        else:
            context.load_verify_locations(ca)
        if credentials.certificate:
            context.load_cert_chain(credentials.certificate, credentials.key or None, password=lambda: "")
    except OSError as error:
        named = ", ".join(filter(None, credentials._replace(ca=ca)))
        raise HopError(
            f"{named} cannot be used ({error.strerror or error}); fix the variable that names it, or the file"
        ) from None


def _default_roots(protocol: Protocol) -> str:
    """Return the file of the authorities that the exporter trusts by default: its library's list, never the
    system's."""
    if protocol == "HTTP":
        import certifi  # requests needs it

        return certifi.where()
    return os.environ.get(GRPC_ROOTS_VARIABLE) or str(files("grpc") / "_cython/_credentials/roots.pem")


def _is_enough(start: bytes) -> bool:
    return b"\r\n\r\n" in start if start.startswith(b"HTTP/1.") else len(start) >= 9


def _speaks(start: bytes, otherwise: Speaks) -> Speaks:
    if start.startswith(b"HTTP/1."):
        return Speaks.HTTP
    if len(start) >= 9 and start[3] == _SETTINGS_FRAME and start[5:9] == bytes(4):
        return Speaks.GRPC
    return Speaks.OTHER if start else otherwise
