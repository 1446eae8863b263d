"""The hops of one route, probed by raw sockets: fast, and precise where an exporter reports only a
failure."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from typing import Final

from otel_dflash.doctor import sockets
from otel_dflash.doctor.clock import Clock
from otel_dflash.doctor.finding import Finding, HopError, Status, unknown, wrong
from otel_dflash.doctor.route import Route
from otel_dflash.doctor.sockets import PROBE_S, Address, Answer, Speaks

_USUAL_PORTS: Final = {"gRPC": 4317, "HTTP": 4318}
_FLAGS: Final = {"gRPC": "grpc", "HTTP": "http/protobuf"}
_CLIENT_FILES: Final = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY"


class Hops:
    """Probes a route, and adds what it learns about the server's clock to `clock`."""

    def __init__(self, route: Route, clock: Clock, deadline: float) -> None:
        """Prepare; `deadline` is in the time of time.monotonic()."""
        self._route = route
        self._clock = clock
        self._deadline = deadline
        self._addresses: list[Address] = []
        self._address: Address | None = None
        self._is_secured = False
        self.is_broken = False
        """Whether a hop does not work, so that nothing sent can arrive."""

    def probe(self) -> Iterator[Finding]:
        """Yield a finding for each hop, up to the first that does not work."""
        route = self._route
        if not route.host:
            yield unknown("socket", f"not probed: only gRPC understands the target {route.url}")
            return
        if route.proxy:
            yield from self._step("proxy", self._reach_proxy)
            return
        steps = [
            ("name resolved", self._resolve),
            ("TCP connect", self._connect),
            ("protocol spoken", self._speak),
        ]
        if route.tls:
            steps.insert(2, ("TLS handshake", self._secure))
        for check, step in steps:
            yield from self._step(check, step)
            if self.is_broken:
                return

    def _step(self, check: str, step: Callable[[], str]) -> Iterator[Finding]:
        start = time.monotonic()
        try:
            text = step()
        except HopError as error:
            self.is_broken = True
            yield wrong(check, str(error), time.monotonic() - start)
            return
        yield Finding(
            Status.WARNING if check == "proxy" else Status.OK, check, text, time.monotonic() - start
        )

    def _reach_proxy(self) -> str:
        proxy = self._route.proxy
        assert proxy
        path = f"{proxy.variable} sends OTLP for {self._route.host} through {proxy.host}:{proxy.port}"
        remedy = f"{proxy.bypass}={self._route.host} keeps it off the proxy"
        try:
            addresses = sockets.resolve(proxy.host, proxy.port, self._left_s())
            sockets.connect(addresses, self._left_s())[0].close()
        except (HopError, OSError):
            raise HopError(f"{path}, where no proxy answers; {remedy}") from None
        return f"{path}; {remedy}, unless it must go there"

    def _resolve(self) -> str:
        self._addresses = sockets.resolve(self._route.host, self._route.port, self._left_s())
        return ", ".join(dict.fromkeys(str(address[0]) for _, address in self._addresses))

    def _connect(self) -> str:
        route = self._route
        place = f"{route.host}:{route.port}"
        try:
            connection, self._address = sockets.connect(self._addresses, self._left_s())
        except ConnectionRefusedError:
            start = (
                "; start the collector (here: otel-dflash stack up)"
                if route.is_local
                else "; start the collector there"
            )
            raise HopError(f"nothing listens at {place}{start}, or fix the endpoint") from None
        except TimeoutError:
            raise HopError(
                f"no answer from {place}: a firewall drops the packets, or the host is down; ask whoever "
                f"runs it"
            ) from None
        except OSError as error:
            raise HopError(
                f"{place} cannot be reached ({error.strerror}); look at routes and firewalls"
            ) from None
        connection.close()
        return f"{self._address[1][0]}:{route.port}"

    def _secure(self) -> str:
        route = self._route
        assert self._address
        try:
            connection, _ = sockets.connect([self._address], self._left_s())
            with (
                connection,
                sockets.handshake(connection, route.host, route.protocol, route.credentials) as secured,
            ):
                self._is_secured = True
                return secured.version() or ""
        except ssl.SSLError as error:
            raise self._distrust(error) from None
        except TimeoutError:
            raise HopError(self._silent()) from None
        except OSError:  # closed in the middle: a gRPC server without TLS does that
            raise self._mismatch(Answer(Speaks.NOTHING)) from None

    def _speak(self) -> str:
        route = self._route
        assert self._address
        try:
            connection, _ = sockets.connect([self._address], self._left_s())
            with connection:
                secured = (
                    sockets.handshake(connection, route.host, route.protocol, route.credentials)
                    if route.tls
                    else connection
                )
                with secured:
                    before = time.time()
                    answer = sockets.ask(secured, route.host, "/", route.protocol)
        except ssl.SSLError as error:
            raise self._distrust(error) from None
        except TimeoutError:
            raise HopError(self._silent()) from None
        except OSError:
            raise self._mismatch(Answer(Speaks.NOTHING)) from None
        if answer.speaks is Speaks.SILENT:
            raise HopError(self._silent())
        if answer.speaks.value != route.protocol:
            raise self._mismatch(answer)
        if answer.speaks is Speaks.HTTP:
            self._clock.add("the collector", _date(answer.start), before)
        return f"{route.protocol}{' over TLS' if route.tls else ''}"

    def _left_s(self) -> float:
        return max(0.1, min(PROBE_S, self._deadline - time.monotonic()))

    def _silent(self) -> str:
        return (
            f"{self._route.host}:{self._route.port} takes connections and never answers: it hangs, or is "
            "not a collector; restart it"
        )

    def _distrust(self, error: ssl.SSLError) -> HopError:
        """Return why one side does not trust the other, or that there is no TLS."""
        credentials = self._route.credentials
        if isinstance(error, ssl.SSLCertVerificationError):
            if "ostname mismatch" in error.verify_message or "IP address mismatch" in error.verify_message:
                return HopError(
                    f"the collector's certificate is not for {self._route.host!r}; use the name that it "
                    f"is for"
                )
            if "expired" in error.verify_message or "not yet valid" in error.verify_message:
                return HopError(
                    f"{error.verify_message} (the collector's, by this machine's clock); renew it, or "
                    "set the clock"
                )
            ca = f"{credentials.ca!r}" if credentials.ca else "the public ones"
            return HopError(
                f"the collector's certificate is from another CA than {ca} ({error.verify_message}); "
                "set OTEL_EXPORTER_OTLP_CERTIFICATE to the file of its CA"
            )
        if not sockets.is_about_certificates(error):
            return self._mismatch(Answer(Speaks.NOTHING))
        return self._distrusted(error.reason or "")

    def _distrusted(self, reason: str) -> HopError:
        """Return why the collector does not trust this client."""
        credentials = self._route.credentials
        if not credentials.certificate:
            beside = (
                " (gRPC reads them only together with OTEL_EXPORTER_OTLP_CERTIFICATE)"
                if self._route.protocol == "gRPC"
                else ""
            )
            return HopError(f"the collector wants a client certificate; set {_CLIENT_FILES}{beside}")
        detail = f" ({reason})" if reason else ""
        return HopError(
            f"the collector does not accept the client certificate {credentials.certificate!r}{detail}; "
            f"get one "
            "from its CA"
        )

    def _mismatch(self, answer: Answer) -> HopError:
        """Return what answers at that port instead of what was expected."""
        route = self._route
        assert self._address
        place = f"{route.host}:{route.port}"
        found = sockets.look_again(self._address, route.host, max(0.5, self._deadline - time.monotonic()))
        if self._is_secured and found == (True, Speaks.NOTHING):  # gRPC's core closes without an alert
            return self._distrusted("")
        if found is None:
            greeting = f": it sent {answer.start[:24]!r}" if answer.start else ""
            return HopError(
                f"{place} speaks neither gRPC nor HTTP{greeting}; give the port of the collector's OTLP "
                f"receiver"
            )
        tls, speaks = found
        faults = [f"{'speaks' if tls else 'does not speak'} TLS"] if tls != route.tls else []
        remedies = [f"begin the URL with {'https' if tls else 'http'}://"] if tls != route.tls else []
        if speaks not in (Speaks.NOTHING, Speaks(route.protocol)):
            faults.append(f"speaks {speaks.value}, not {route.protocol}")
            remedies.append(
                f"use --protocol {_FLAGS[speaks.value]}, or the port for {route.protocol} (usually "
                f"{_USUAL_PORTS[route.protocol]})"
            )
        if not faults:
            return HopError(f"{place} closes connections; try again, and see the collector's log")
        return HopError(f"{place} {' and '.join(faults)}; {' and '.join(remedies)}")


def _date(head: bytes) -> str | None:
    for line in head.decode("latin-1").split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "date":
            return value.strip()
    return None
