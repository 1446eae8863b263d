"""The SDK's log, made readable: one line per kind of failure with a count, no traceback, no credential."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Final, TextIO

REPEAT_S: Final = 30.0

_USER_INFO: Final = re.compile(r"//\S*@")  # up to the last @: a password may hold one, and a /
_HEADER: Final = re.compile(r"(header (?:name|part|value|metadata)\b[^:]*: |metadata was invalid: ).*", re.IGNORECASE)
_KINDS_MAX: Final = 100
_TEXT_MAX: Final = 240
_SECRET_LOGGER: Final = "opentelemetry.util.re"  # it logs the header that it cannot parse
_NUMBER: Final = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")
# What the SDK's exporters log (1.45); the groups hold the reason. Any other text is its own reason.
_REASONS: Final = (
    re.compile(r"Failed to export .*, error code: (?:StatusCode\.)?(\w+), error details: (.*)"),
    re.compile(r"Failed to export .* batch code: (.*?), reason: (.*)"),
    re.compile(r"Transient error (?:StatusCode\.)?(.*?) encountered while exporting .*?(?:Error details: (.*))?"),
)
_RETRIED: Final = "Transient error "
_NO_ANSWER: Final = "due to timeout, max retries or shutdown"  # all that the HTTP exporter says of a server that is silent
_WITHOUT_REASON: Final = (_NO_ANSWER, "Shutdown in progress", "already shutdown")
_CAUSE: Final = re.compile(r".*Caused by (\w+)\(.*?(?:: |, [\"'])(.*?)[\"']?\)\)")
_CLIENT_FILES: Final = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY"
_CLIENT: Final = f"the collector wants a client certificate that it trusts and that is in date; see {_CLIENT_FILES}"
_NAME: Final = "the collector's certificate is for another name; use the name that it was made for, or make one for this"
_AUTHORITY: Final = "the collector's certificate is by nobody trusted here; name its CA's PEM file by OTEL_EXPORTER_OTLP_CERTIFICATE"
_KEY: Final = f"the key is not that of the certificate; see {_CLIENT_FILES}"
_TOKEN: Final = "the collector does not take the token; put authorization=Bearer TOKEN into the file of OTEL_DFLASH_OTLP_HEADERS_FILE"
_RIGHTS: Final = "the collector knows the token, and it may not write here; ask whoever runs it"
_PROXY: Final = "a proxy is in the way; put the collector's host into NO_PROXY and no_proxy"
_GRPC: Final = "that port does not speak HTTP/1; try --protocol grpc"
_SIGNAL: Final = (
    "only one of traces and metrics is taken there; send to a collector, or set OTEL_TRACES_EXPORTER or OTEL_METRICS_EXPORTER to none"
)
_HTTP: Final = "that port does not speak gRPC; try --protocol http/protobuf"
# What a mistake in endpoint or credentials looks like from the inside, and what mends it; the first one counts.
_HINTS: Final = (
    ("ProxyError", _PROXY),
    ("HTTP proxy", _PROXY),
    ("certificate has expired", "the collector's certificate is out of date, or this host's clock is wrong"),
    ("certificate is not yet valid", "the collector's certificate is of the future, or this host's clock is wrong"),
    ("Hostname Verification Check failed", _NAME),
    ("certificate is not valid for", _NAME),
    ("CERTIFICATE_VERIFY_FAILED", _AUTHORITY),
    ("ALERT_CERTIFICATE", _CLIENT),
    ("ALERT_UNKNOWN_CA", _CLIENT),
    ("ALERT_BAD_CERTIFICATE", _CLIENT),
    ("Unwrap failed", _CLIENT),  # all that gRPC says of an alert after its own handshake
    ("EOF occurred in violation of protocol", _CLIENT),  # so it looks when the alert came after the request was written
    ("KEY_VALUES_MISMATCH", _KEY),
    ("Failed to create security handshaker", _KEY),
    ("UNAUTHENTICATED", _TOKEN),
    ("401: ", _TOKEN),
    ("PERMISSION_DENIED", _RIGHTS),
    ("403: ", _RIGHTS),
    ("Failed parsing HTTP/2", _HTTP),
    ("status: 404", _HTTP),
    ("unknown service", _SIGNAL),
    ("BadStatusLine", _GRPC),
    ("ConnectionResetError", "perhaps a port for gRPC; try --protocol grpc"),
    ("RemoteDisconnected", "perhaps a port for gRPC; try --protocol grpc"),
    ("Not Found", "nothing takes OTLP at that path; give the base URL, without /v1/traces"),
    ("WRONG_VERSION_NUMBER", "that port does not speak TLS; begin the URL with http://"),
    ("Socket closed", "the collector went away, or it speaks TLS: then the URL begins with https://"),
    ("400: Bad Request", "what was sent is not taken; if the collector speaks TLS, begin the URL with https://"),
)
_LAST_ERROR: Final = re.compile(r".*last error: (?:\w+: )?(.*)")
_OTHER_LOOPBACK: Final = re.compile(r"ipv6:(?:%5B|\[)::1(?:%5D|\]):.*refused", re.IGNORECASE)
# What TLS libraries put around the cause: codes, their own source lines.
_DEBRIS: Final = re.compile(
    r"SSL_ERROR_SSL: error:\w+:SSL routines:OPENSSL_internal:| ?\((?:TSI_\w+|_ssl\.c:\d+)\)|"
    r"Custom verification check failed with error: \w+: |: OK$|['\"]\)*$"
)


class NoiseFilter(logging.Handler):
    """Handler for the logger tree ``opentelemetry``: a new kind of failure is said at once, again at most each `repeat_s`.

    A kind is what has the same remedy, else the same reason but for its numbers, whichever exporter says it; without a reason it is
    logger and message template. As a context manager it takes the tree over, so nothing of it reaches other handlers.
    """

    def __init__(self, stream: TextIO, repeat_s: float = REPEAT_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self.reasons: dict[str, str] = {}
        """Thread (a sink has one) -> why its newest export failed, one line."""
        self._explained: set[str] = set()  # threads whose export is retried for a reason that was said
        self._stream = stream
        self._repeat_s = repeat_s
        self._clock = clock
        self._kinds: dict[tuple[str, ...], tuple[int, float]] = {}  # count, time of the last line

    def __enter__(self) -> NoiseFilter:
        logger = logging.getLogger("opentelemetry")
        self._before = logger.propagate, logger.level
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.removeHandler(self)
        logger.propagate, level = self._before
        logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record under its kind; write a line when it is due."""
        try:
            self._take(record)
        except (TypeError, ValueError, LookupError, OSError):  # arguments that don't fit the template, a log on a full disk
            self.handleError(record)

    def _take(self, record: logging.LogRecord) -> None:
        template = str(record.msg)
        text = template.split(": %s")[0] if record.name == _SECRET_LOGGER else record.getMessage()
        text = redact(" ".join(text.split()))
        reason = reason_of(text)
        thread = record.threadName or ""
        if reason:
            if not _OTHER_LOOPBACK.search(reason):
                self.reasons[thread] = reason
            else:  # the name has two addresses, and what listens has one of them: its answer tells more
                self.reasons.setdefault(thread, reason)
            if text.startswith(_RETRIED):
                self._explained.add(thread)
        elif _NO_ANSWER in text and thread in self._explained:
            self._explained.discard(thread)
            return  # the end of an export whose reason was said
        elif _NO_ANSWER in text:
            self.reasons[thread] = "no success before the timeout"
        kind = (_kind(reason),) if reason else (record.name, template)
        if kind not in self._kinds and len(self._kinds) >= _KINDS_MAX:
            self._kinds.pop(next(iter(self._kinds)))
        count, said_s = self._kinds.get(kind, (0, -self._repeat_s))
        now_s = self._clock()
        due = count == 0 or now_s - said_s >= self._repeat_s
        self._kinds[kind] = count + 1, now_s if due else said_s
        if due:
            times = f" ({count + 1} times)" if count else ""
            self._stream.write(f"otel-dflash: {_message(text, reason)}{times}\n")
            self._stream.flush()


def describe(error: BaseException) -> str:
    """Return one line on why an export or a constructor raised."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {redact(text)[:_TEXT_MAX]}" if text else type(error).__name__


def redact(text: str) -> str:
    """Return text without the user and password of a URL, and without what requests quotes of a header it refuses."""
    return _HEADER.sub(r"\1***", _USER_INFO.sub("//***@", text))


def reason_of(text: str) -> str | None:
    """Return why an export failed, short, from what an SDK exporter logged; None when the line does not say."""
    if any(phrase in text for phrase in _WITHOUT_REASON):
        return None
    for pattern in _REASONS:
        match = pattern.fullmatch(text)
        if match:
            code, detail = match[1], match[2]
            return _short(f"{code}: {detail}" if detail and code != "None" else detail or code)
    return _short(text)


def remedy_in(reason: str) -> str:
    """Return the remedy at the end of what `reason_of` returned, '' where none is known."""
    return next((remedy for _, remedy in _HINTS if reason.endswith(f"({remedy})")), "")


def _short(text: str) -> str:
    hint = next((f" ({remedy})" for sign, remedy in _HINTS if sign in text), "")
    for pattern in (_CAUSE, _LAST_ERROR):
        match = pattern.fullmatch(text)
        if match:
            text = ": ".join(match.groups())
    return _DEBRIS.sub("", text)[:_TEXT_MAX] + hint


def _kind(reason: str) -> str:
    return remedy_in(reason) or _NUMBER.sub("#", reason)


def _message(text: str, reason: str | None) -> str:
    """Return the line: what failed up to where its reason starts, then the reason."""
    if reason is None or reason.startswith(text[:40]):
        return reason or text[:_TEXT_MAX]
    head = re.split(rf", error code: | batch code: |{_RETRIED}", text)[0].strip()
    return f"{head[:_TEXT_MAX] or 'Export is retried'}: {reason}"
