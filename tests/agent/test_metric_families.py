"""A metric family whose totals cannot be used folds again by itself; the others go on from theirs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from otel_dflash.agent.sinks.metrics import MetricSink
from otel_dflash.config import AgentConfig
from otel_dflash.metrics import fold
from otel_dflash.metrics.families import families
from otel_dflash.metrics.families.phases import Phases
from otel_dflash.recording.frames import Frame
from otel_dflash.recording.payloads import RING_FILL, OpenWork
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.segments import segments
from otel_dflash.recording.writer import RecordingWriter
from tests.metrics.life import CREATED, Life
from tests.metrics.planted import PlantedRing, agent_frames, open_frame, samples_frame

MS = 1_000_000
S = 1_000_000_000
WALL = 1_700_000_000 * S
CONFIG = AgentConfig(0.1, 1 << 30, metric_interval_ns=10 * S, metric_age_ns_max=3600 * S, exit_timeout_s=1)
CURSOR = "cursor-metrics-test.json"


class Requests(MetricExporter):
    """Keeps each request as its bytes, and its points by metric."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.requests: list[bytes] = []
        self.points: dict[str, list[tuple[int, int, float]]] = {}  # start and time in s, value

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        self.requests.append(encode_metrics(metrics_data).SerializeToString())
        for resource in metrics_data.resource_metrics:
            for metric in resource.scope_metrics[0].metrics:
                for point in metric.data.data_points:
                    times = (
                        (time_ns - WALL) // S
                        for time_ns in (point.start_time_unix_nano, point.time_unix_nano)
                    )
                    value = point.value if hasattr(point, "value") else point.count
                    self.points.setdefault(metric.name.removeprefix("dflash."), []).append((*times, value))
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        pass


class Run:
    """A recording of one worker, a step each second, and sinks that go through it."""

    def __init__(self, directory: Path, segment_bytes: int = 1 << 20) -> None:
        self.directory = directory
        create_recording(directory, RunInfo("run-1", "node-1", WALL, 0, WALL, "0.1.0"))
        self.writer = RecordingWriter(directory, 1 << 30, segment_bytes=segment_bytes)
        self.ring = PlantedRing(1, "target", 0, created_ns=1 * S, gpu=0)
        self.ring.name(3, "starved queue_get")
        self.ring.name(3, "busy forward")
        self.ring.step(1 * S, 1 * S, tokens=5, loss_tokens=2)
        self.append(self.ring.names_frame(), S)
        self.append(self.ring.flush(S), S)

    def append(self, frame: Frame, time_ns: int) -> None:
        self.writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, time_ns)

    def live(self, first_s: int, last_s: int) -> None:
        """Record these seconds: phases that cross their borders, and what the agent says of itself."""
        for second in range(first_s, last_s):
            now = second * S
            self.ring.phase("queue_get", now, now + (second % 7) * 50 * MS, "starved")
            self.ring.phase(
                "forward", now + 400 * MS, now + 900 * MS, error="OSError" if second == 9 else None
            )
            self.append(self.ring.flush(now + 900 * MS), now + 900 * MS)
            self.ring.step(now, now + 950 * MS, tokens=10, loss_tokens=4)
            self.ring.consumed(now + S, 2)
            self.append(self.ring.flush(now + S), now + S)
            self.append(self.ring.counters(second + 1, second * 10 + 5, 0, 0, second // 5), now + S)
            for frame in agent_frames(second * MS, fill={1: second / 100}, lags={"spans": second / 10}):
                self.append(frame, now + S)
            self.append(open_frame(now + S, {self.ring.ring: OpenWork(None, ())}), now + S)

    def end_another_worker(self, last_s: int) -> None:
        """Record a worker whose phases are named in another order than they end in."""
        ring = PlantedRing(2, "drafter", 0, created_ns=S)
        ring.name(3, "lock_wait outer")
        for second in range(1, last_s):
            now = second * S
            ring.phase("inner", now + 200 * MS, now + 300 * MS)
            ring.phase(
                "outer", now + 100 * MS, now + 800 * MS, "lock_wait", "OSError" if second % 2 else None
            )
            ring.step(now, now + 900 * MS, tokens=3, loss_tokens=1)
        for frame in (ring.names_frame(), ring.flush(last_s * S), ring.closed(last_s * S)):
            self.append(frame, last_s * S)

    def send(self, keep_cursor: bool = True) -> Requests:
        """Let a sink started now go to the end of what is recorded."""
        exporter = Requests()
        sink = MetricSink(
            "test", exporter, self.directory, CONFIG, keep_cursor=keep_cursor, clock=lambda: WALL + 100 * S
        )
        sink.run()
        sink.reader.close()
        assert sink.done.is_set()
        return exporter

    def totals(self) -> dict[str, Any]:
        """Return the totals in the cursor."""
        found: dict[str, Any] = json.loads((self.directory / CURSOR).read_bytes())["totals"]
        return found

    def damage(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the totals of the families in the cursor."""
        cursor = json.loads((self.directory / CURSOR).read_bytes())
        change(cursor["totals"]["families"])
        (self.directory / CURSOR).write_text(json.dumps(cursor))


def frames_of(directory: Path) -> list[Frame]:
    reader = RecordingReader(directory)
    frames = []
    while found := reader.read():
        frames += found
    reader.close()
    return frames


UNUSABLE: dict[str, Callable[[dict[str, Any], str], object]] = {
    "of another version": lambda found, name: found[name].update(version=99),
    "missing": lambda found, name: found.pop(name),
    "null": lambda found, name: found.update({name: None}),
    "without rings": lambda found, name: found[name].pop("rings"),
    "of something else": lambda found, name: found[name].update(rings=[[1 << 28, "?"]]),
}


@pytest.mark.parametrize("name", [family.name for family in families(1)])
@pytest.mark.parametrize("damage", UNUSABLE)
def test_a_family_without_usable_totals_goes_on_as_if_it_had_them(
    name: str, damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    well, hurt = Run(tmp_path / "well"), Run(tmp_path / "hurt")
    found = []
    for run in (well, hurt):
        run.live(1, 9)
        run.end_another_worker(9)
        run.live(9, 27)
        run.send()
        if run is hurt:
            run.damage(lambda totals: UNUSABLE[damage](totals, name))
        run.live(27, 58)
        found.append(run.send().requests)
    assert found[1] == found[0]
    assert len(found[0]) == 4
    assert hurt.totals() == well.totals()
    assert capfd.readouterr().err.count(f"metrics-test: the totals of {name} cannot be used") == 1
    assert hurt.send(keep_cursor=False).requests[-1] == found[0][-1], "a fold from the start gives the same"


@pytest.mark.parametrize("end_ns", ["text", -1, 1e30], ids=str)
def test_a_cursor_without_a_usable_end_of_its_interval_is_folded_again(end_ns: Any, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.live(1, 27)
    run.send()
    cursor = json.loads((run.directory / CURSOR).read_bytes())
    (run.directory / CURSOR).write_text(json.dumps({**cursor, "interval_end_ns": end_ns}))
    run.live(27, 58)
    assert run.send().requests == run.send(keep_cursor=False).requests


def values(part: Any, way: tuple[Any, ...] = (), shape: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the shape of the way to every plain value, without indices and ids, and the way."""
    if not isinstance(part, (dict, list)):
        yield shape, way
        return
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        name = key if str(key).isidentifier() else "*"
        yield from values(value, (*way, key), f"{shape}.{name}")


@pytest.mark.parametrize("wrong", ["text", [[1]]], ids=str)
def test_totals_of_wrong_types_are_folded_again(wrong: Any, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.live(1, 27)
    run.send()
    sound = (run.directory / CURSOR).read_bytes()
    run.live(27, 58)
    expected = run.send().requests[-1]
    ways = dict(values(json.loads(sound)["totals"]))  # one of each shape
    assert {".time_ns", ".rings.*.last_ns", ".families.workers.rings.*.*.steps"} < set(ways)
    for shape, (*steps, last) in ways.items():
        cursor = json.loads(sound)
        part = cursor["totals"]
        for step in steps:
            part = part[step]
        part[last] = wrong
        (run.directory / CURSOR).write_text(json.dumps(cursor))
        assert run.send().requests[-1] == expected, shape


def test_a_new_version_of_a_family_folds_again_and_the_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run-1", segment_bytes=5000)
    run.live(1, 27)
    before = run.send()
    assert before.points["step.duration"] == [(1, 10, 10), (1, 20, 20), (1, 27, 27)]
    segments(run.directory)[0][1].unlink()  # as the size cap does; the totals of it are in the cursor
    start_s = frames_of(run.directory)[0].time_ns // S
    monkeypatch.setattr(Phases, "version", Phases.version + 1)
    run.live(27, 32)
    after = run.send()
    assert after.points["worker.batches"] == [(1, 30, 30), (1, 32, 32)]
    assert after.points["training.tokens"] == [(1, 30, 295), (1, 30, 118), (1, 32, 315), (1, 32, 126)]
    steps = 32 - start_s  # it does not know of what was removed
    assert after.points["step.duration"] == [(start_s, 30, steps - 2), (start_s, 32, steps)]
    assert start_s > 1


def test_where_the_oldest_frames_are_gone_a_fold_from_the_start_says_since_when_it_counts(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run-1", segment_bytes=5000)
    run.live(1, 27)
    whole = run.send(keep_cursor=False)
    segments(run.directory)[0][1].unlink()
    start_s = frames_of(run.directory)[0].time_ns // S
    rest = run.send(keep_cursor=False)
    assert whole.points["worker.time"][-6:] != rest.points["worker.time"][-6:]
    for name in ("phase.duration", "step.duration", "worker.time", "training.tokens", "telemetry.events"):
        assert {start for start, _, _ in whole.points[name]} == {1}
        assert {start for start, _, _ in rest.points[name]} == {start_s}
        assert rest.points[name][-1][2] <= whole.points[name][-1][2]
    spent_s = sum(value for _, time_s, value in rest.points["worker.time"] if time_s == 27)
    assert spent_s == pytest.approx(27 - frames_of(run.directory)[0].time_ns / S, abs=0.1)
    for name in (
        "worker.batches",
        "worker.tokens",
        "telemetry.events.dropped",
    ):  # the ring itself counts these, and the session, which began at 0, the steps without a ring
        assert {start for start, _, _ in rest.points[name]} - {0} == {1}
    assert rest.points["worker.batches"][-1] == whole.points["worker.batches"][-1]


def test_a_family_folds_again_what_is_left_where_all_that_was_sent_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run-1", segment_bytes=5000)
    run.live(1, 27)
    run.send()
    sent = json.loads((run.directory / CURSOR).read_bytes())["position"]
    run.live(27, 57)
    found = segments(run.directory)
    for (_, path), (following, _) in pairwise(found):
        if following <= sent + run.writer.next_number // len(found):  # as the size cap does in an outage
            path.unlink()
    start_s = frames_of(run.directory)[0].time_ns // S
    monkeypatch.setattr(Phases, "version", Phases.version + 1)
    after = run.send()
    whole = run.send(keep_cursor=False)
    assert start_s > 27
    assert after.points["step.duration"][-1] == whole.points["step.duration"][-1]
    assert whole.points["step.duration"][-1][:2] == (start_s, 57)
    assert after.points["worker.batches"][-1] == (1, 57, 57)


def test_a_figure_that_follows_the_end_of_its_ring_does_not_begin_it_again(tmp_path: Path) -> None:
    """A poll that retires a ring may end an interval, and so be where a cursor stands, before its fill."""
    run = Run(tmp_path / "run")
    run.live(1, 9)
    run.end_another_worker(9)
    run.live(9, 10)
    run.send()
    run.append(samples_frame({RING_FILL: 0.5}, 2 << 28), 10 * S)
    run.live(10, 31)
    counts = [(1, 31, 0), (1, 31, 1), (1, 31, 1), (1, 31, 0)]  # running and ended, of both roles
    assert run.send().points["worker.count"][-4:] == counts
    assert run.send(keep_cursor=False).points["worker.count"][-4:] == counts


class Killed(BaseException):
    """The agent was killed: nothing of it runs any more."""


class KilledAfter(Requests):
    """An exporter in an agent that is killed when it has exported so often."""

    def __init__(self, exports: int) -> None:
        super().__init__()
        self.exports_left = exports

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        result = super().export(metrics_data)
        self.exports_left -= 1
        if not self.exports_left:
            raise Killed
        return result


@pytest.mark.parametrize("seed", range(2))
def test_metrics_are_the_same_to_the_byte_sent_live_after_kills_or_by_replay(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two workers that are made again, some of them after their series have ended."""
    monkeypatch.setattr(fold, "RETIRED_NS", 40 * MS)
    dice = random.Random(seed)
    frames: list[Frame] = []
    for index in (1, 2):
        now = CREATED
        for number in range(4):
            ring = PlantedRing(10 * index + number, "drafter", index, created_ns=now)
            life = Life(random.Random(seed + 10 * index + number), ring, 0.05, now=now)
            lived = life.live(40, 2)
            frames += [ring.names_frame(now), *lived, replace(ring.closed(life.now), time_ns=life.now)]
            now = life.now + dice.choice([MS, 100 * MS])
    frames.sort(key=lambda frame: frame.time_ns)
    directory = tmp_path / "run-1"
    create_recording(directory, RunInfo("run-1", "node-1", WALL, 0, WALL, "0.1.0"))
    live = RecordingWriter(directory, 1 << 30, segment_bytes=20_000)
    for frame in frames:
        live.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns)
    config = CONFIG._replace(metric_interval_ns=20 * MS)

    def sent(exporter: Requests, keep_cursor: bool, writer: RecordingWriter | None = None) -> list[bytes]:
        sink = MetricSink(
            "test", exporter, directory, config, writer, keep_cursor=keep_cursor, clock=lambda: WALL + 100 * S
        )
        sink.finish()
        with suppress(Killed):
            sink.run()
        sink.reader.close()
        return exporter.requests

    replayed = sent(Requests(), keep_cursor=False)
    assert len(replayed) > 10
    assert sent(Requests(), False, live) == replayed
    after_kills: list[bytes] = []
    while after_kills[-1:] != replayed[-1:]:
        again = sent(KilledAfter(dice.randrange(1, 5)), keep_cursor=True)
        if after_kills:
            assert again[0] == after_kills[-1]  # it was in flight
        after_kills += again[bool(after_kills) :]
    assert after_kills == replayed
    live.close()
