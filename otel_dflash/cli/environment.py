"""The environments of `otel-dflash run`: the agent's, with the flags in it, and the command's, without
credentials."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from otel_dflash import config
from otel_dflash.config import ConfigError
from otel_dflash.session import Session

if TYPE_CHECKING:
    from otel_dflash.stack.control import Addresses

ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL_VARIABLE: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
SIGNAL_ENDPOINT_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
SIGNAL_PROTOCOL_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL",
)
ENDPOINT_VARIABLES: Final = re.compile(r"OTEL_EXPORTER_OTLP_(\w+_)?ENDPOINT")
HEADER_VARIABLE: Final = re.compile(r"OTEL_EXPORTER_OTLP_(\w+_)?HEADERS")
EXPORTER_PREFIXES: Final = (
    "OTEL_EXPORTER_",
    "OTEL_TRACES_",
    "OTEL_METRICS_",
    config.HEADERS_FILE_VARIABLE,
    config.KEEP_VARIABLE,
)


def endpoint_of(environment: Mapping[str, str]) -> str:
    """Return the endpoint that an environment sets, for both signals or for one; "" when it sets none."""
    return next(
        (
            environment[name]
            for name in (ENDPOINT_VARIABLE, *SIGNAL_ENDPOINT_VARIABLES)
            if environment.get(name)
        ),
        "",
    )


def with_endpoint(
    environment: Mapping[str, str], endpoint: str | None, protocol: str | None
) -> dict[str, str]:
    """Return the agent's environment: the user's, overridden by the flags, which also override the variables
    of a single signal.

    Raises:
        ConfigError: The endpoint has no scheme, or an endpoint that the command would inherit contains a user
        or
            a password.
    """
    config.check_no_user("--endpoint", endpoint or "")
    for variable in filter(ENDPOINT_VARIABLES.fullmatch, environment):
        config.check_no_user(variable, environment[variable])
    if endpoint is not None and "://" not in endpoint:  # the SDK would assume TLS
        raise ConfigError(
            f"the endpoint has no scheme, got {endpoint!r}; try http://{endpoint} (or https://)"
        )
    changed = dict(environment)
    for value, variable, narrower in (
        (endpoint, ENDPOINT_VARIABLE, SIGNAL_ENDPOINT_VARIABLES),
        (protocol, PROTOCOL_VARIABLE, SIGNAL_PROTOCOL_VARIABLES),
    ):
        if value is not None:
            changed[variable] = value
            for name in narrower:
                changed.pop(name, None)
    return changed


def with_stack(environment: Mapping[str, str], stack: Addresses, protocol: str | None) -> dict[str, str]:
    """Return the agent's environment for sending to the stack of this host, whatever endpoint is set, and
    without a proxy."""
    from otel_dflash.stack.services import around_proxies

    protocol = protocol or environment.get(PROTOCOL_VARIABLE) or "grpc"
    endpoint = stack.endpoint(protocol)
    changed = around_proxies(
        with_endpoint(environment, endpoint, protocol), [urlsplit(endpoint).hostname or ""]
    )
    changed.pop("no_grpc_proxy", None)  # gRPC would read it instead
    return changed


def of_command(environment: Mapping[str, str], joined: Session, pass_headers: bool) -> dict[str, str]:
    """Return the command's environment. Its children inherit the session, but not the collector's
    credentials, unless `pass_headers`."""
    changed = {**environment, config.SESSION_VARIABLE: str(joined.path)}
    if not pass_headers:
        for name in filter(HEADER_VARIABLE.fullmatch, environment):
            del changed[name]
    return changed


def take_up(endpoint: str | None, protocol: str | None) -> None:
    """Make os.environ what an agent with these flags would see.

    Raises:
        ConfigError: A setting cannot work.
    """
    changed = with_endpoint(os.environ, endpoint, protocol)
    validate(changed)
    os.environ.clear()
    os.environ.update(changed)


def validate(environment: Mapping[str, str]) -> None:
    """Check the exporter settings before training starts: the agent would only find out later.

    Raises:
        ConfigError: An endpoint, a protocol, the name of an exporter or a file of headers cannot work.
    """
    if not any(name.startswith(EXPORTER_PREFIXES) for name in environment):
        return  # without loading the SDK
    from otel_dflash.otlp import exporters
    from otel_dflash.spans import sampling

    exporters.validate_environment(environment)
    sampling.Sampling.from_environment(environment)
