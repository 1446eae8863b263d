"""What proves to a collector who sends, and to us who receives: the headers file and the certificate files that the environment names.

No message shows what is in them.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from otel_dflash.config import HEADERS_FILE_VARIABLE, ConfigError

Signal = Literal["traces", "metrics"]

GRPC_ROOTS_VARIABLE: Final = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
"""gRPC trusts that file in place of its own list where no certificate is set."""

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_CERTIFICATES: Final = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")


def setting(signal: Signal, name: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (variable, value) of an OTLP setting: the signal's own, else the one for all; ('', '') when neither is set."""
    for variable in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
        value = environ.get(variable, "").strip()
        if value:
            return variable, value
    return "", ""


def credential_files(signal: Signal, environ: Mapping[str, str]) -> list[Path]:
    """Return every file that an exporter's credentials come from."""
    names = [environ.get(HEADERS_FILE_VARIABLE, "").strip(), *(setting(signal, name, environ)[1] for name in _CERTIFICATES)]
    return [Path(name) for name in names if name]


def uses_tls(signal: Signal, is_grpc: bool, environ: Mapping[str, str]) -> bool:
    """Return whether an OTLP exporter speaks TLS, as the SDK decides it.

    Raises:
        ConfigError: The endpoint says no and the INSECURE variable says yes; the SDK would try TLS.
    """
    endpoint_variable, endpoint = setting(signal, "ENDPOINT", environ)
    scheme = urlsplit(endpoint).scheme if "://" in endpoint else ""
    if not is_grpc or not endpoint or scheme == "https":
        return scheme == "https"
    variable, insecure = setting(signal, "INSECURE", environ)
    if scheme == "http" and insecure and insecure.lower() != "true":
        raise ConfigError(
            f"{variable}={insecure} asks for TLS, and {endpoint_variable} begins with http://; begin it with https://, or unset {variable}"
        )
    return scheme != "http" and insecure.lower() != "true"


def check_certificates(signal: Signal, is_grpc: bool, environ: Mapping[str, str]) -> None:
    """Check the files of an exporter that speaks TLS: gRPC would take its own list of authorities for a missing one, without a word.

    Raises:
        ConfigError: A file cannot be read, is no PEM, or does not fit the others; or gRPC would ignore it.
    """
    (ca_variable, ca), (variable, certificate), (key_variable, key) = (setting(signal, name, environ) for name in _CERTIFICATES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca and (is_grpc or not Path(ca).is_dir()):  # over HTTP it may be a directory of hashed names
        _check_authorities(context, ca_variable, ca)
    if is_grpc and not ca and (roots := environ.get(GRPC_ROOTS_VARIABLE, "")):  # grpcio 1.85 aborts the process when it cannot read it
        _check_authorities(context, GRPC_ROOTS_VARIABLE, roots)
    if key and not certificate:
        raise ConfigError(f"{key_variable} is set without a client certificate; set {key_variable.replace('KEY', 'CERTIFICATE')} too")
    if not certificate:
        return
    if is_grpc:
        _check_same_kind(variable, {"CERTIFICATE": ca_variable, "CLIENT_KEY": key_variable})
    _read_pem(variable, certificate)
    if key:
        _read_pem(key_variable, key)
    try:
        context.load_cert_chain(certificate, key or None, password=lambda: "")  # without it OpenSSL would ask at the terminal
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"the client certificate {certificate!r} cannot be used with the key {key or certificate!r} ({reason}); "
            f"{variable} and {key_variable or 'OTEL_EXPORTER_OTLP_CLIENT_KEY'} name PEM files that belong together, the key not encrypted"
        ) from None


def read_headers_file(environ: Mapping[str, str]) -> str:
    """Return the headers in the file of OTEL_DFLASH_OTLP_HEADERS_FILE as one line, '' when unset.

    Raises:
        ConfigError: It cannot be read, or a line is no header.
    """
    name = environ.get(HEADERS_FILE_VARIABLE, "").strip()
    if not name:
        return ""
    try:
        text = _read(HEADERS_FILE_VARIABLE, name).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{HEADERS_FILE_VARIABLE} must name a text file in UTF-8, got {name!r}; write one header a line") from None
    headers = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        for header in filter(None, (part.strip() for part in line.split(","))):
            key, separator, value = header.partition("=")
            if not separator or not _HEADER_NAME.fullmatch(key.strip()) or not value.isprintable():
                raise ConfigError(f"{HEADERS_FILE_VARIABLE}: line {number} of {name!r} is not key=value; write one header a line")
            headers.append(f"{key.strip()}={value.strip()}")
    return ",".join(headers)


@contextmanager
def headers_in_environment(signal: Signal, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let the variable that an exporter reads also hold the headers of the file, while it is made and not longer.

    Raises:
        ConfigError: The file cannot be read.
    """
    headers = read_headers_file(environ)
    variable = setting(signal, "HEADERS", environ)[0] or "OTEL_EXPORTER_OTLP_HEADERS"
    before = environ.get(variable)
    if headers:
        environ[variable] = f"{before},{headers}" if before else headers  # of one name the last value counts
    try:
        yield
    finally:
        if before is not None:
            environ[variable] = before
        elif headers:
            del environ[variable]


def _check_same_kind(variable: str, others: Mapping[str, str]) -> None:
    """The gRPC exporter takes all three files from the variables of one signal, or all three from those for both."""
    for name, found in others.items():
        wanted = variable.replace("CLIENT_CERTIFICATE", name)
        if found != wanted:
            raise ConfigError(f"{variable} has no effect over gRPC without {wanted}, got {found or 'none'}; set {wanted} too")


def _check_authorities(context: ssl.SSLContext, variable: str, name: str) -> None:
    _read_pem(variable, name)
    try:
        context.load_verify_locations(name)
    except ssl.SSLError as error:
        raise ConfigError(f"{variable} has no certificate of an authority in {name!r} ({error.reason}); name a PEM file") from None


def _read_pem(variable: str, name: str) -> None:
    if b"-----BEGIN " not in _read(variable, name):
        raise ConfigError(f"{variable} must name a PEM file, got {name!r}; convert it with openssl")


def _read(variable: str, name: str) -> bytes:
    try:
        if not stat.S_ISFIFO(mode := Path(name).stat().st_mode) and not stat.S_ISCHR(mode):
            return Path(name).read_bytes()
        raise ConfigError(f"{variable} must name a file that can be read again and again, got {name!r}; write it to a regular file")
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise ConfigError(f"{variable} names a file that cannot be read, got {name!r} ({reason}); check path and mode") from None
