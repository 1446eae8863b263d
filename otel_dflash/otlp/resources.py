"""The resource of exported data: attributes from the environment, and those of the run, process and role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry.sdk.resources import (
    TELEMETRY_SDK_LANGUAGE,
    TELEMETRY_SDK_NAME,
    TELEMETRY_SDK_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.version import __version__ as sdk_version

from otel_dflash import semconv
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.spans.attributes import AttributeValue

_SDK: Final[dict[str, AttributeValue]] = {
    TELEMETRY_SDK_LANGUAGE: "python",
    TELEMETRY_SDK_NAME: "opentelemetry",
    TELEMETRY_SDK_VERSION: sdk_version,
}


class HashedResource(Resource):
    """A Resource that computes its hash once.

    Encoders hash the resource of every span, and Resource.__hash__ runs json.dumps each time.
    """

    def __init__(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Take the attributes as they are. Nothing is added: the same frames always give the same bytes."""
        super().__init__(attributes)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        """Return the hash computed at construction."""
        return self._hash


class Resources:
    """Makes the resources of a run.

    The SDK's own detector reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, once.
    """

    def __init__(self, info: RunInfo) -> None:
        """Read the environment."""
        detected = OTELResourceDetector().detect().attributes
        self._environment = {key: value for key, value in detected.items() if isinstance(value, str)}
        self._service = self._environment.get(semconv.SERVICE_NAME) or semconv.DEFAULT_SERVICE_NAME
        self._info = info

    def for_role(self, role: str, pid: int) -> Resource:
        """Return the resource of a role's spans: `service.name` is `<service>-<role>`."""
        namespace = self._environment.get(semconv.SERVICE_NAMESPACE, self._service)
        own = {semconv.SERVICE_NAME: f"{self._service}-{role}", semconv.SERVICE_NAMESPACE: namespace}
        return self._make(f"{pid}", {**own, semconv.PROCESS_PID: pid})

    def for_process(self, pid: int) -> Resource:
        """Return the resource of a process's metrics, where the role is an attribute."""
        return self._make(f"{pid}", {semconv.SERVICE_NAME: self._service, semconv.PROCESS_PID: pid})

    def for_agent(self) -> Resource:
        """Return the resource of the agent's own metrics.

        It has no pid, so a restarted agent continues the same series.
        """
        return self._make("agent", {semconv.SERVICE_NAME: self._service})

    def _make(self, instance: str, own: Mapping[str, AttributeValue]) -> Resource:
        info = self._info
        identity = {
            semconv.SERVICE_INSTANCE_ID: f"{info.run}-{info.host}-{instance}",
            semconv.HOST_NAME: info.host,
            semconv.RUN_ID: info.run,
        }
        return HashedResource({**_SDK, **self._environment, **identity, **own})
