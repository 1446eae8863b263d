"""Where the canary must show up: the HTTP APIs of Jaeger and Prometheus, queried directly, without a
proxy."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from contextlib import closing
from typing import Any, ClassVar, Final
from urllib.parse import quote, urlsplit

from otel_dflash import semconv
from otel_dflash.config import ConfigError
from otel_dflash.doctor.clock import Clock
from otel_dflash.doctor.finding import HopError
from otel_dflash.doctor.sockets import within
from otel_dflash.otlp.redaction import redact

REQUEST_S: Final = 3.0
METRIC: Final = f"{semconv.DOCTOR_CANARY[0].replace('.', '_')}_seconds"
"""The canary's metric as Prometheus names a gauge in s."""
_BODY_BYTES_MAX: Final = 1 << 22


def fetch(connection: http.client.HTTPConnection, path: str) -> tuple[http.client.HTTPResponse, bytes]:
    """Return the response to a GET, and its body or the first 4 MiB of it; close the connection.

    Raises:
        OSError, UnicodeError, http.client.HTTPException: No response arrives, or it is not HTTP.
    """
    with closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response, response.read(_BODY_BYTES_MAX)


class Backend:
    """One HTTP API."""

    usual_port: ClassVar[int]

    def __init__(self, name: str, url: str, clock: Clock) -> None:
        """`url` is its base, such as http://localhost:16686.

        Raises:
            ConfigError: `url` is not the URL of an HTTP API.
        """
        self.name = name
        url = (url if "://" in url else f"http://{url}").rstrip("/")
        self.url = redact(url)
        self._clock = clock
        try:
            self._parts = urlsplit(url)
            is_url = (
                self._parts.scheme in ("http", "https") and self._parts.hostname and self._parts.port != 0
            )
        except ValueError:
            is_url = False
        if not is_url:
            raise ConfigError(
                f"--{name.lower()} must be the URL of an HTTP API, got {self.url!r}; try http://localhost:{self.usual_port}"
            )

    def get(self, path: str, timeout_s: float) -> tuple[int, Any]:
        """Return the status and the decoded body, None for a body that is not JSON.

        Raises:
            HopError: The API does not answer; the text has the reason and the remedy.
        """
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=REQUEST_S)
        before = time.time()
        try:
            response, body = within(
                max(0.1, min(REQUEST_S, timeout_s)),
                lambda: fetch(connection, f"{self._parts.path.rstrip('/')}{path}"),
            )
        except ConnectionRefusedError:
            raise HopError(
                f"nothing listens at {self.url}; start {self.name}, or fix --{self.name.lower()}"
            ) from None
        except ssl.SSLError as error:
            raise HopError(f"no TLS with {self.url} ({error.reason}); fix --{self.name.lower()}") from None
        except TimeoutError:
            raise HopError(
                f"{self.url} does not answer in time; see the log of {self.name}, or fix "
                f"--{self.name.lower()}"
            ) from None
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise HopError(
                f"{self.url} does not answer as {self.name} would ({reason}); fix --{self.name.lower()}"
            ) from None
        self._clock.add(self.name, response.headers.get("Date"), before)
        try:
            return response.status, json.loads(body)
        except ValueError:
            return response.status, None


class Jaeger(Backend):
    """Jaeger's query service."""

    usual_port = 16686

    def has_trace(self, trace_id: int, timeout_s: float) -> bool:
        """Return whether Jaeger shows the trace.

        Raises:
            HopError: The URL is not Jaeger's, or nothing answers.
        """
        status, body = self.get(f"/api/v3/traces/{trace_id:032x}", timeout_s)
        if status == 404 and body is not None:  # Jaeger's answer for an unknown trace
            return False
        if status != 200 or not isinstance(body, dict) or "result" not in body:
            raise HopError(
                f"{self.url} is not Jaeger's query service (HTTP {status}); fix --jaeger (usually port "
                f"{self.usual_port})"
            )
        return f"{trace_id:032x}" in json.dumps(body)


class Prometheus(Backend):
    """Prometheus's query API."""

    usual_port = 9090

    def has_value(self, value: float, timeout_s: float) -> bool:
        """Return whether the canary's metric had that value in the last minutes.

        Raises:
            HopError: The URL is not Prometheus's, or nothing answers.
        """
        return any(
            float(sample[1]) == value
            for series in self.query(f"{METRIC}[10m]", timeout_s)
            for sample in series["values"]
        )

    def query(self, expression: str, timeout_s: float) -> list[dict[str, Any]]:
        """Return the result of an instant query.

        Raises:
            HopError: The URL is not Prometheus's, or nothing answers.
        """
        status, body = self.get(f"/api/v1/query?query={quote(expression)}", timeout_s)
        data = body.get("data") if isinstance(body, dict) else None
        if status != 200 or not isinstance(data, dict) or not isinstance(data.get("result"), list):
            raise HopError(
                f"{self.url} is not Prometheus's API (HTTP {status}); fix --prometheus (usually port "
                f"{self.usual_port})"
            )
        result: list[dict[str, Any]] = data["result"]
        return result
