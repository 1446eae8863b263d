"""Why an export failed, in one line with its remedy."""

from __future__ import annotations

import re
from typing import Final

from otel_dflash.otlp.redaction import redact

TEXT_MAX: Final = 240

# What the SDK's exporters log (1.45); the groups hold the reason. Any other text is its own reason.
_REASONS: Final = (
    re.compile(r"Failed to export .*, error code: (?:StatusCode\.)?(\w+), error details: (.*)"),
    re.compile(r"Failed to export .* batch code: (.*?), reason: (.*)"),
    re.compile(
        r"Transient error (?:StatusCode\.)?(.*?) encountered while exporting .*?(?:Error details: (.*))?"
    ),
)
# all that the HTTP exporter logs about a server that does not answer
NO_ANSWER: Final = "due to timeout, max retries or shutdown"
_WITHOUT_REASON: Final = (NO_ANSWER, "Shutdown in progress", "already shutdown")
_CAUSE: Final = re.compile(r".*Caused by (\w+)\(.*?(?:: |, [\"'])(.*?)[\"']?\)\)")

_CLIENT_FILES: Final = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY"
_CLIENT: Final = (
    f"the collector wants a client certificate that it trusts and that is not expired; see {_CLIENT_FILES}"
)
_NAME: Final = (
    "the collector's certificate is for another name; use that name, or issue a certificate for this one"
)
_AUTHORITY: Final = (
    "the collector's certificate is not from a trusted authority; name its CA's PEM file in "
    "OTEL_EXPORTER_OTLP_CERTIFICATE"
)
_KEY: Final = f"the key does not belong to the certificate; see {_CLIENT_FILES}"
_TOKEN: Final = (
    "the collector rejects the token; put authorization=Bearer TOKEN into the file of "
    "OTEL_DFLASH_OTLP_HEADERS_FILE"
)
_RIGHTS: Final = (
    "the collector accepts the token, but it has no permission to write here; ask whoever runs it"
)
_PROXY: Final = "a proxy is in the way; put the collector's host into NO_PROXY and no_proxy"
_GRPC: Final = "that port does not speak HTTP/1; try --protocol grpc"
_SIGNAL: Final = (
    "only traces or only metrics are accepted there; send to a collector, or set OTEL_TRACES_EXPORTER or "
    "OTEL_METRICS_EXPORTER to none"
)
_HTTP: Final = "that port does not speak gRPC; try --protocol http/protobuf"
# How a wrong endpoint or wrong credentials show up in a reason, and the remedy; the first match counts.
_HINTS: Final = (
    ("ProxyError", _PROXY),
    ("HTTP proxy", _PROXY),
    ("certificate has expired", "the collector's certificate has expired, or this host's clock is wrong"),
    (
        "certificate is not yet valid",
        "the collector's certificate is not valid yet, or this host's clock is wrong",
    ),
    ("Hostname Verification Check failed", _NAME),
    ("certificate is not valid for", _NAME),
    ("CERTIFICATE_VERIFY_FAILED", _AUTHORITY),
    ("ALERT_CERTIFICATE", _CLIENT),
    ("ALERT_UNKNOWN_CA", _CLIENT),
    ("ALERT_BAD_CERTIFICATE", _CLIENT),
    ("Unwrap failed", _CLIENT),  # all that gRPC reports of an alert after its own handshake
    # the alert arrived after the request was written
    ("EOF occurred in violation of protocol", _CLIENT),
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
    ("ConnectionResetError", "this may be a gRPC port; try --protocol grpc"),
    ("RemoteDisconnected", "this may be a gRPC port; try --protocol grpc"),
    ("Not Found", "nothing accepts OTLP at that path; give the base URL, without /v1/traces"),
    ("WRONG_VERSION_NUMBER", "that port does not speak TLS; begin the URL with http://"),
    ("Socket closed", "the collector closed the connection; if it speaks TLS, begin the URL with https://"),
    (
        "400: Bad Request",
        "the data was not accepted; if the collector speaks TLS, begin the URL with https://",
    ),
)

_LAST_ERROR: Final = re.compile(r".*last error: (?:\w+: )?(.*)")
# What TLS libraries add around the cause: codes, lines of their source.
_DEBRIS: Final = re.compile(
    r"SSL_ERROR_SSL: error:\w+:SSL routines:OPENSSL_internal:| ?\((?:TSI_\w+|_ssl\.c:\d+)\)|"
    r"Custom verification check failed with error: \w+: |: OK$|['\"]\)*$"
)


def describe(error: BaseException) -> str:
    """Return in one line why an export or a constructor raised."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {redact(text)[:TEXT_MAX]}" if text else type(error).__name__


def reason_of(text: str) -> str | None:
    """Return why an export failed, from a line that an SDK exporter logged; None if it says nothing."""
    if any(phrase in text for phrase in _WITHOUT_REASON):
        return None
    for pattern in _REASONS:
        match = pattern.fullmatch(text)
        if match:
            code, detail = match[1], match[2]
            return _short(f"{code}: {detail}" if detail and code != "None" else detail or code)
    return _short(text)


def remedy_in(reason: str) -> str:
    """Return the remedy at the end of a reason that `reason_of` returned, '' if there is none."""
    return next((remedy for _, remedy in _HINTS if reason.endswith(f"({remedy})")), "")


def _short(text: str) -> str:
    hint = next((f" ({remedy})" for sign, remedy in _HINTS if sign in text), "")
    for pattern in (_CAUSE, _LAST_ERROR):
        match = pattern.fullmatch(text)
        if match:
            text = ": ".join(match.groups())
    return _DEBRIS.sub("", text)[:TEXT_MAX] + hint
