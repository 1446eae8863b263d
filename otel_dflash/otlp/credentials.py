"""Credentials: the headers file and the certificate files that the environment names.

No message shows their contents.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from otel_dflash.config import HEADERS_FILE_VARIABLE, ConfigError
from otel_dflash.otlp.settings import Signal, setting

GRPC_ROOTS_VARIABLE: Final = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
"""Names the authorities that gRPC trusts, instead of its own list, if no certificate is set."""

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_CERTIFICATES: Final = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")


def credential_files(signal: Signal, environ: Mapping[str, str]) -> list[Path]:
    """Return every file that holds credentials of an exporter."""
    names = [
        environ.get(HEADERS_FILE_VARIABLE, "").strip(),
        *(setting(signal, name, environ)[1] for name in _CERTIFICATES),
    ]
    return [Path(name) for name in names if name]


def check_certificates(signal: Signal, is_grpc: bool, environ: Mapping[str, str]) -> None:
    """Check the certificate files of an exporter that uses TLS.

    gRPC would silently replace a missing file by its own list of authorities.

    Raises:
        ConfigError: A file cannot be read, is not PEM, does not match the others, or gRPC would ignore it.
    """
    (ca_variable, ca), (variable, certificate), (key_variable, key) = (
        setting(signal, name, environ) for name in _CERTIFICATES
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca and (is_grpc or not Path(ca).is_dir()):  # HTTP also takes a directory of hashed names
        _check_authorities(context, ca_variable, ca)
    # grpcio 1.85 aborts the process if it cannot read this file
    if is_grpc and not ca and (roots := environ.get(GRPC_ROOTS_VARIABLE, "")):
        _check_authorities(context, GRPC_ROOTS_VARIABLE, roots)
    if key and not certificate:
        raise ConfigError(
            f"{key_variable} is set without a client certificate; set "
            f"{key_variable.replace('KEY', 'CERTIFICATE')} too"
        )
    if not certificate:
        return
    if is_grpc:
        _check_same_kind(variable, {"CERTIFICATE": ca_variable, "CLIENT_KEY": key_variable})
    _read_pem(variable, certificate)
    if key:
        _read_pem(key_variable, key)
    try:
        # without a password OpenSSL would prompt at the terminal
        context.load_cert_chain(certificate, key or None, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"the client certificate {certificate!r} cannot be used with the key {key or certificate!r} "
            f"({reason}); "
            f"{variable} and {key_variable or 'OTEL_EXPORTER_OTLP_CLIENT_KEY'} must name a matching "
            "pair of PEM files, the key not encrypted"
        ) from None


def read_headers_file(environ: Mapping[str, str]) -> str:
    """Return the headers in the file of OTEL_DFLASH_OTLP_HEADERS_FILE as one line, '' if it is unset.

    Raises:
        ConfigError: The file cannot be read, or a line is not a header.
    """
    name = environ.get(HEADERS_FILE_VARIABLE, "").strip()
    if not name:
        return ""
    try:
        text = _read(HEADERS_FILE_VARIABLE, name).decode()
    except UnicodeDecodeError:
        raise ConfigError(
            f"{HEADERS_FILE_VARIABLE} must name a text file in UTF-8, got {name!r}; write one header per line"
        ) from None
    headers = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        for header in filter(None, (part.strip() for part in line.split(","))):
            key, separator, value = header.partition("=")
            if not separator or not _HEADER_NAME.fullmatch(key.strip()) or not value.isprintable():
                raise ConfigError(
                    f"{HEADERS_FILE_VARIABLE}: line {number} of {name!r} is not key=value; write one "
                    "header per line"
                )
            headers.append(f"{key.strip()}={value.strip()}")
    return ",".join(headers)


@contextmanager
def headers_in_environment(signal: Signal, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Add the headers of the file to the variable that an exporter reads, while the exporter is created.

    Raises:
        ConfigError: The file cannot be read.
    """
    headers = read_headers_file(environ)
    variable = setting(signal, "HEADERS", environ)[0] or "OTEL_EXPORTER_OTLP_HEADERS"
    before = environ.get(variable)
    if headers:
        # if a name occurs twice, the last value counts
        environ[variable] = f"{before},{headers}" if before else headers
    try:
        yield
    finally:
        if before is not None:
            environ[variable] = before
        elif headers:
            del environ[variable]


def _check_same_kind(variable: str, others: Mapping[str, str]) -> None:
    """Check that all three files come from variables of one kind.

    The gRPC exporter reads all three from those of the signal, or all three from those for both signals.
    """
    for name, found in others.items():
        wanted = variable.replace("CLIENT_CERTIFICATE", name)
        if found != wanted:
            raise ConfigError(
                f"{variable} has no effect over gRPC without {wanted}, got {found or 'none'}; set "
                f"{wanted} too"
            )


def _check_authorities(context: ssl.SSLContext, variable: str, name: str) -> None:
    _read_pem(variable, name)
    try:
        context.load_verify_locations(name)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{variable}: {name!r} contains no CA certificate ({error.reason}); name a PEM file"
        ) from None


def _read_pem(variable: str, name: str) -> None:
    if b"-----BEGIN " not in _read(variable, name):
        raise ConfigError(f"{variable} must name a PEM file, got {name!r}; convert it with openssl")


def _read(variable: str, name: str) -> bytes:
    try:
        if not stat.S_ISFIFO(mode := Path(name).stat().st_mode) and not stat.S_ISCHR(mode):
            return Path(name).read_bytes()
        raise ConfigError(
            f"{variable} must name a file that can be read repeatedly, got {name!r}; write it to a "
            "regular file"
        )
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise ConfigError(
            f"{variable} names a file that cannot be read, got {name!r} ({reason}); check its path and mode"
        ) from None
