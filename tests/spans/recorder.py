"""Writes the frames of a recording by hand, following records.py, and shows the spans they give as they are
on the wire."""

from __future__ import annotations

import json
import struct
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from otel_dflash.otlp.span_data import SpanData
from otel_dflash.recording.catalog import Catalog
from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.run_info import RunInfo
from otel_dflash.records import UNSET, Kind, NameKind, ValueType
from otel_dflash.spans.replay import SpanReplay
from otel_dflash.spans.span import Span
from tests import otlp_receiver
from tests.otlp_receiver import spans_of, tree

WALL_NS = 1_700_000_000_000_000_000
MONO_NS = 5_000_000_000
INFO = RunInfo("run-1", "node-1", WALL_NS, MONO_NS, WALL_NS, "0.1.0")
MS = 1_000_000


COMMON = (
    "dflash.worker.role",
    "dflash.worker.id",
    "dflash.clock.domain",
    "dflash.gpu.index",
    "dflash.worker.state",
    "thread.id",
    "thread.name",
)


class Recorder:
    """Writes the frames of one worker, following records.py; times in ms after the anchor."""

    def __init__(
        self, log: Log, number: int, role: str, index: int = 0, gpu: int | None = None, pid: int = 4242
    ) -> None:
        self.log = log
        self.ring = number << 28
        self.slots: list[bytes] = []
        self.first = 0
        self.names: list[tuple[NameKind, str]] = []
        worker = {"role": role, "index": index, "gpu": gpu, "pid": pid, "created_ns": MONO_NS}
        self.name(NameKind.WORKER, json.dumps(worker))
        self.name(NameKind.TEXT, "_OTHER")

    def name(self, kind: NameKind, text: str) -> int:
        """Return the id of a name; a new one goes into the log at once."""
        if (kind, text) not in self.names:
            self.names.append((kind, text))
            data = text.encode()
            self.log.append(
                FrameKind.NAMES, self.ring, len(self.names) - 1, 1, struct.pack("<HB", len(data), kind) + data
            )
        return self.names.index((kind, text))

    def record(self, kind: Kind, name: int, error: int, *words: int) -> None:
        lap = 1 + (self.first + len(self.slots)) // 16320
        self.slots.append(
            struct.pack("<8Q", lap << 40 | kind << 32 | name << 16 | error, *words, *[0] * (7 - len(words)))
        )

    def phase(
        self, name: str, start: float, end: float, step: int = 0, state: str = "busy", error: str = ""
    ) -> None:
        self.record(
            Kind.PHASE,
            self.name(NameKind.PHASE, f"{state} {name}"),
            self.text(error),
            mono(start),
            mono(end),
            self.ring + step,
        )

    def step(self, step: int, start: float, end: float, **said: Any) -> None:
        thread = self.name(NameKind.THREAD, json.dumps({"id": 77, "name": "target-0"}))
        labels = (said.get("number", -1) + 1) << 16 | self.text(said.get("bucket", ""))
        words = (said.get("tokens", UNSET), said.get("loss_tokens", UNSET), labels, said.get("root", 0))
        self.record(
            Kind.STEP,
            thread,
            self.text(said.get("error", "")),
            mono(start),
            mono(end),
            self.ring + step,
            *words,
        )

    def attribute(self, step: int, at: float, key: str, kind: ValueType, word: int) -> None:
        self.record(Kind.ATTRIBUTE, self.text(key), 0, mono(at), kind, self.ring + step, word % (1 << 64))

    def consumed(self, step: int, at: float, item: Item, fixed_root: bool = False, bucket: str = "") -> None:
        queue = self.name(
            NameKind.QUEUE, json.dumps({"name": "hidden_states", "capacity": 64, "min_ready": None})
        )
        words = (mono(at), wall(item[2]), self.ring + step, item[0], item[1], self.text(bucket))
        self.record(Kind.CONSUMED, queue, int(fixed_root), *words)

    def resumed(self, step: int, at: float, item: Item) -> None:
        self.record(Kind.RESUMED, 0, 0, mono(at), wall(item[2]), self.ring + step, item[0], item[1])

    def text(self, text: str) -> int:
        return self.name(NameKind.TEXT, text) if text else 0

    def drain(self) -> None:
        """Let the agent take what was recorded: one frame."""
        if self.slots:
            self.log.append(FrameKind.RECORDS, self.ring, self.first, len(self.slots), b"".join(self.slots))
            self.first += len(self.slots)
            self.slots = []

    def lose(self) -> None:
        """Lose the newest record: the ring was full."""
        self.slots.pop()

    def close(
        self, end: float, phases: dict[str, float] | None = None, step: tuple[int, float] | None = None
    ) -> None:
        self.drain()
        opened = [
            [self.name(NameKind.PHASE, f"busy {name}"), mono(start)] for name, start in (phases or {}).items()
        ]
        open_step = [self.ring + step[0], mono(step[1])] if step else None
        closed = {"end_ns": mono(end), "killed": True, "open": opened, "step": open_step, "unseen": False}
        self.log.append(FrameKind.CLOSED, self.ring, 0, 0, json.dumps(closed).encode())


Item = tuple[int, int, float]
"""Root, producing step, put time in ms."""


class Log:
    """Frames in order, and the catalog that a reader has by then."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.catalog = Catalog()

    def append(self, kind: FrameKind, ring: int, first: int, count: int, payload: bytes) -> None:
        self.frames.append(Frame(len(self.frames), kind, ring, first, count, MONO_NS, payload))
        self.catalog.apply(self.frames[-1])

    def replay(self) -> list[Span]:
        replay = SpanReplay(INFO, self.catalog)
        return [span for frame in self.frames for span in replay.add(frame)]


def mono(ms: float) -> int:
    return MONO_NS + round(ms * MS)


def wall(ms: float) -> int:
    return WALL_NS + round(ms * MS)


def on_the_wire(spans: list[Span]) -> list[otlp_receiver.Span]:
    return spans_of(encode_spans(SpanData(INFO).readable_spans(spans)))


def shape(spans: list[Span]) -> list[dict[str, Any]]:
    """Return the tree without what every span of the worker repeats."""
    return tree(on_the_wire(spans), COMMON)
