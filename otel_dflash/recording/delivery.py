"""delivery.json: an agent's report at its end on what it delivered."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from otel_dflash.recording.atomic_file import write_atomically
from otel_dflash.session import DELIVERY_FILE


@dataclass(frozen=True)
class SampledSpans:
    """What the sampler left out, and what was kept although the sampler would have left it out."""

    sampler: str
    keep: list[str]
    left_out_spans: int
    kept_steps: dict[str, int]  # reason -> steps
    lost_traces: int  # to be kept in the end, but some of their spans were no longer available


@dataclass(frozen=True)
class SignalDelivery:
    """The delivery of one signal, over all of its exporters."""

    delivered: bool  # in full
    failures: int  # exports that raised or did not succeed
    unusable_records: int
    losses: list[str]  # data left out although all else was delivered, one line each
    pending: int  # frames not delivered yet
    reason: str | None  # why not all was delivered
    sampled: SampledSpans | None = None


@dataclass(frozen=True)
class RecordingLosses:
    """What the recording itself lacks."""

    lost_frames: int  # the disk had no room
    removed_segments: int  # beyond the size cap


@dataclass(frozen=True)
class DeliveryReport:
    """The whole report."""

    signals: dict[str, SignalDelivery]  # by "spans" and "metrics"; none without an exporter
    recording: RecordingLosses | None = None

    @property
    def undelivered(self) -> dict[str, str]:
        """Return the reason by signal, of those not delivered in full."""
        return {name: f"{signal.reason}" for name, signal in self.signals.items() if not signal.delivered}

    def write(self, directory: Path) -> None:
        """Write the report into a recording.

        Raises:
            OSError: The file cannot be written.
        """
        data = {name: asdict(signal) for name, signal in self.signals.items()}
        if self.recording:
            data["recording"] = asdict(self.recording)
        write_atomically(directory / DELIVERY_FILE, json.dumps(data, indent=1).encode())


def read_delivery(directory: Path) -> DeliveryReport:
    """Return the report of a recording; an empty one if there is none, or it cannot be read.

    A field that is missing or of the wrong type does not take the others with it.
    """
    try:
        data = json.loads((directory / DELIVERY_FILE).read_bytes())
        losses = data.pop("recording", None)
        return DeliveryReport(
            {name: _signal(signal) for name, signal in data.items()},
            RecordingLosses(**_typed(losses, lost_frames=0, removed_segments=0)) if losses else None,
        )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return DeliveryReport({})


def _signal(data: Any) -> SignalDelivery:
    known = _typed(data, delivered=True, failures=0, unusable_records=0, losses=[], pending=0)
    reason, sampled = data.get("reason"), data.get("sampled")
    return SignalDelivery(
        **known,
        reason=None if reason is None else f"{reason}",
        sampled=_sampled(sampled) if sampled else None,
    )


def _sampled(data: Any) -> SampledSpans:
    return SampledSpans(**_typed(data, sampler="", keep=[], left_out_spans=0, kept_steps={}, lost_traces=0))


def _typed(data: Any, **defaults: Any) -> dict[str, Any]:
    """Return those fields of a JSON object, a default in place of what is missing or of another type.

    Raises:
        AttributeError: The data is not an object.
    """
    values = {name: data.get(name) for name in defaults}
    return {
        name: values[name] if type(values[name]) is type(default) else default
        for name, default in defaults.items()
    }
