"""Frames written by hand after records.py alone: what the tests of the readers feed them, independent of the
trainer and the drain."""

from __future__ import annotations

import json
import struct

from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import (
    AGENT_CPU,
    RECORD_COST,
    RING_FILL,
    UNRECORDED_STEPS,
    WALL_OFFSET,
    Closed,
    Open,
    OpenWork,
    Sample,
    Series,
    encode_open,
    encode_samples,
    encode_series,
    lag_series,
)

SLOT = struct.Struct("<8Q")
UNSET_TOKENS = 1 << 63


class PlantedRing:
    """One worker's ring. Records collect in `slots` until `flush` makes a frame of them."""

    def __init__(
        self, ring: int, role: str, index: int, pid: int = 100, created_ns: int = 0, gpu: int | None = None
    ) -> None:
        self.ring = ring << 28
        self.slots: list[bytes] = []
        self.first = 0
        self.serial = 0
        worker = {"role": role, "index": index, "gpu": gpu, "pid": pid, "created_ns": created_ns}
        self.names: list[tuple[int, str]] = [(1, json.dumps(worker)), (2, "_OTHER")]

    def name(self, kind: int, text: str) -> int:
        if (kind, text) not in self.names:
            self.names.append((kind, text))
        return self.names.index((kind, text))

    def slot(self, kind: int, name: int, error: str | None, *words: int) -> None:
        error_id = self.name(2, error) if error else 0
        lap = 1 + (self.first + len(self.slots)) // 16384
        padded = [*words, *[0] * (7 - len(words))]
        self.slots.append(SLOT.pack(lap << 40 | kind << 32 | name << 16 | error_id, *padded))

    def phase(self, name: str, start: int, end: int, state: str = "busy", error: str | None = None) -> None:
        self.slot(1, self.name(3, f"{state} {name}"), error, start, end, self.ring + self.serial + 1)

    def step(
        self,
        start: int,
        end: int,
        tokens: int = UNSET_TOKENS,
        error: str | None = None,
        loss_tokens: int = UNSET_TOKENS,
    ) -> None:
        self.serial += 1
        thread = self.name(4, json.dumps({"id": 7, "name": "worker"}))
        self.slot(2, thread, error, start, end, self.ring + self.serial, tokens, loss_tokens, 0, 0)

    def consumed(self, time: int, producer: int, queue: str = "hidden_states") -> None:
        name = self.name(5, json.dumps({"name": queue, "capacity": None, "min_ready": None}))
        self.slot(4, name, None, time, time - 1, self.ring + self.serial + 1, 0, (producer << 28) + 5, 0)

    def resumed(self, time: int, producer: int) -> None:
        self.slot(5, 0, None, time, time - 1, self.ring + self.serial + 1, 0, (producer << 28) + 5)

    def names_frame(self, time: int = 0) -> Frame:
        payload = b"".join(
            struct.pack("<HB", len(text.encode()), kind) + text.encode() for kind, text in self.names
        )
        return Frame(0, FrameKind.NAMES, self.ring, 0, len(self.names), time, payload)

    def flush(self, time: int | None = None) -> Frame:
        """Return the records since the last flush as a frame."""
        slots, self.slots = self.slots, []
        frame = Frame(
            0,
            FrameKind.RECORDS,
            self.ring,
            self.first,
            len(slots),
            10**12 if time is None else time,
            b"".join(slots),
        )
        self.first += len(slots)
        return frame

    def counters(self, *values: int) -> Frame:
        return Frame(
            0, FrameKind.COUNTERS, self.ring, 0, len(values), 0, struct.pack(f"<{len(values)}Q", *values)
        )

    def closed(
        self,
        end: int,
        killed: bool = False,
        open_phases: list[tuple[str, str, int]] | None = None,
        step: int | None = None,
    ) -> Frame:
        phases = tuple(
            Open(self.name(3, f"{state} {name}"), start) for state, name, start in open_phases or []
        )
        inside = Open(self.ring + self.serial + 1, step) if step is not None else None
        payload = Closed(end, killed, phases, inside).encode()
        return Frame(0, FrameKind.CLOSED, self.ring, 0, 0, 0, payload)


def open_frame(time: int, rings: dict[int, OpenWork], detail: int = 0) -> Frame:
    return Frame(0, FrameKind.OPEN, 0, 0, len(rings), time, encode_open(detail, rings))


SERIES = dict(
    enumerate((AGENT_CPU, WALL_OFFSET, RECORD_COST, RING_FILL, lag_series("spans"), lag_series("metrics")))
)
UNRECORDED = {len(SERIES): UNRECORDED_STEPS}


def series_frame(more: dict[int, Series] | None = None) -> Frame:
    series = SERIES | (more or {})
    return Frame(0, FrameKind.SERIES, 0, 0, len(series), 0, encode_series(series))


def samples_frame(values: dict[Series, float], ring: int = 0) -> Frame:
    ids = {series: number for number, series in (SERIES | UNRECORDED).items()}
    samples = [Sample(series, 0, value) for series, value in values.items()]
    return Frame(0, FrameKind.SAMPLES, ring, 0, len(samples), 0, encode_samples(samples, ids))


def agent_frames(
    cpu: int,
    offset: int = 0,
    fill: dict[int, float] | None = None,
    cost: float = 100.0,
    lags: dict[str, float] | None = None,
    unrecorded: int = 0,
) -> list[Frame]:
    """Return all that the agent appends about itself in a second; the series are described first."""
    figures = {AGENT_CPU: cpu, WALL_OFFSET: offset, **({RECORD_COST: cost} if cost else {})}
    figures |= {UNRECORDED_STEPS: unrecorded} if unrecorded else {}
    figures |= {lag_series(sink): lag_s for sink, lag_s in (lags or {}).items()}
    fills = [samples_frame({RING_FILL: ratio}, ring << 28) for ring, ratio in (fill or {}).items()]
    return [series_frame(UNRECORDED if unrecorded else None), samples_frame(figures), *fills]


def catalog_of(*rings: PlantedRing) -> Catalog:
    catalog = Catalog()
    catalog.apply(series_frame(UNRECORDED))
    for ring in rings:
        catalog.apply(ring.names_frame())
    return catalog
