"""Frames written by hand after records.py alone: what the tests of the readers feed them, independent of the trainer and the drain."""

from __future__ import annotations

import json
import struct
from typing import Any

from otel_dflash.agent.catalog import Catalog
from otel_dflash.agent.frames import Frame, FrameKind

SLOT = struct.Struct("<8Q")
UNSET_TOKENS = 1 << 63


class PlantedRing:
    """One worker's ring. Records collect in `slots` until `flush` makes a frame of them."""

    def __init__(self, ring: int, role: str, index: int, pid: int = 100, created_ns: int = 0, gpu: int | None = None) -> None:
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

    def step(self, start: int, end: int, tokens: int = UNSET_TOKENS, error: str | None = None, loss_tokens: int = UNSET_TOKENS) -> None:
        self.serial += 1
        thread = self.name(4, json.dumps({"id": 7, "name": "worker"}))
        self.slot(2, thread, error, start, end, self.ring + self.serial, tokens, loss_tokens, 0, 0)

    def consumed(self, time: int, producer: int, queue: str = "hidden_states") -> None:
        name = self.name(5, json.dumps({"name": queue, "capacity": None, "min_ready": None}))
        self.slot(4, name, None, time, time - 1, self.ring + self.serial + 1, 0, (producer << 28) + 5, 0)

    def resumed(self, time: int, producer: int) -> None:
        self.slot(5, 0, None, time, time - 1, self.ring + self.serial + 1, 0, (producer << 28) + 5)

    def names_frame(self, time: int = 0) -> Frame:
        payload = b"".join(struct.pack("<HB", len(text.encode()), kind) + text.encode() for kind, text in self.names)
        return Frame(0, FrameKind.NAMES, self.ring, 0, len(self.names), time, payload)

    def flush(self, time: int | None = None) -> Frame:
        """Return the records since the last flush as a frame."""
        slots, self.slots = self.slots, []
        frame = Frame(0, FrameKind.RECORDS, self.ring, self.first, len(slots), 10**12 if time is None else time, b"".join(slots))
        self.first += len(slots)
        return frame

    def counters(self, *values: int) -> Frame:
        return Frame(0, FrameKind.COUNTERS, self.ring, 0, len(values), 0, struct.pack(f"<{len(values)}Q", *values))

    def closed(
        self, end: int, killed: bool = False, open_phases: list[tuple[str, str, int]] | None = None, step: int | None = None
    ) -> Frame:
        listed = [[self.name(3, f"{state} {name}"), start] for state, name, start in open_phases or []]
        inside = [self.ring + self.serial + 1, step] if step is not None else None
        return json_frame(FrameKind.CLOSED, self.ring, {"end_ns": end, "killed": killed, "open": listed, "step": inside})


def json_frame(kind: FrameKind, ring: int, payload: dict[str, Any]) -> Frame:
    return Frame(0, kind, ring, 0, 0, 0, json.dumps(payload).encode())


def agent_frame(
    cpu: int, offset: int = 0, fill: dict[int, float] | None = None, cost: float = 100.0, lags: dict[str, float] | None = None
) -> Frame:
    fills = {str(ring << 28): ratio for ring, ratio in (fill or {}).items()}
    figures = {"cpu_ns": cpu, "wall_offset_ns": offset, "fill": fills, "cost_ns": cost, "lags_s": lags or {}}
    return json_frame(FrameKind.AGENT, 0, figures)


def catalog_of(*rings: PlantedRing) -> Catalog:
    catalog = Catalog()
    for ring in rings:
        catalog.apply(ring.names_frame())
    return catalog
