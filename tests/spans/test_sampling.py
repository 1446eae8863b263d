"""Which traces are sent: thinned by the sampler variables, with what is slow or failed, over recordings whose
times are planted."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from otel_dflash.agent.sinks import spans as span_sink
from otel_dflash.agent.sinks.spans import SpanSink
from otel_dflash.config import ConfigError
from otel_dflash.recording.delivery import SampledSpans
from otel_dflash.recording.lookback import Lookback
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import create_recording
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.spans import identity, sampling
from otel_dflash.spans.replay import SpanReplay
from otel_dflash.spans.sampling import Sampling
from otel_dflash.spans.span import Span as NeutralSpan
from tests.otlp_receiver import Span, spans_of
from tests.spans.recorder import INFO, Log, Recorder, on_the_wire
from tests.spans.test_trace_size import fan_out

TENTH = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
OFF = {"OTEL_TRACES_SAMPLER": "always_off"}
RESIDENCE_MS = 600_000  # longer than any collector waits for a decision
STEPS = 1500


class Spans(SpanExporter):
    """Keeps what it gets, as it is on the wire."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.spans += spans_of(encode_spans(spans))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def keep(words: str, environ: Mapping[str, str] = TENTH) -> Sampling:
    return Sampling.from_environment({**environ, "OTEL_DFLASH_KEEP": words})


def recorded(log: Log, directory: Path, segment_bytes: int = 1 << 18) -> Path:
    """Write a log as a recording of several segments."""
    create_recording(directory, INFO)
    writer = RecordingWriter(directory, 1 << 30, segment_bytes=segment_bytes)
    for frame in log.frames:
        writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns)
    writer.close()
    return directory


def sent(directory: Path, asked: Sampling | None) -> tuple[list[Span], SampledSpans | None]:
    """Return what a replay of the recording sends, and what it says of the sampler."""
    exporter = Spans()
    sink = SpanSink("test", exporter, directory, keep_cursor=False, sampling=asked)
    sink.deliver()
    sink.reader.close()
    assert sink.delivered == len(exporter.spans) == len({span.span_id for span in exporter.spans})
    return exporter.spans, sink.sampled


class Pipeline:
    """Two targets whose items lie in the queue for ten minutes; a drafter takes one of each. Every step takes
    25 ms but the slow ones."""

    def __init__(self, slow: Mapping[str, int], failed: Mapping[str, int]) -> None:
        self.log = Log()
        self.first, self.second = Recorder(self.log, 1, "target", 0), Recorder(self.log, 2, "target", 1)
        self.drafter = Recorder(self.log, 3, "drafter")
        self.steps: dict[int, set[int]] = {}  # by root: those of the trace
        for number in range(1, STEPS + 1):
            for target in (self.first, self.second):
                at = 50 * number
                length = 90 if (slow.get("target") == number and target is self.first) else 25
                target.phase("model_forward", at + 1, at + 20, step=number)
                target.phase("queue_put", at + 20, at + 21, step=number, state="backpressured")
                target.step(number, at, at + length)
                self.steps[target.ring + number] = {target.ring + number}
                if number % 4 == 0:
                    target.drain()
        for target in (self.first, self.second):
            target.close(50 * STEPS + 200)  # its names are in no later segment
        for number in range(1, STEPS + 1):
            at = RESIDENCE_MS + 50 * number
            items = [
                (target.ring + number, target.ring + number, 50 * number + 20.5)
                for target in (self.first, self.second)
            ]
            self.drafter.phase("queue_get", at, at + 2, step=number, state="starved")
            for item in items:
                self.drafter.consumed(number, at + 1, item, fixed_root=item is items[0])
            error = "ValueError" if failed.get("phase") == number else ""
            self.drafter.phase("forward", at + 2, at + 5, step=number, error=error)
            length = 90 if number in slow.values() and slow.get("target") != number else 25
            self.drafter.step(
                number,
                at,
                at + length,
                root=items[0][0],
                error="OSError" if failed.get("step") == number else "",
            )
            if failed.get("truncated") == number:
                self.drafter.lose()
            self.steps[items[0][0]].add(self.drafter.ring + number)
            if number % 3 == 0:
                self.drafter.drain()
        self.drafter.drain()

    def expected(self, kept: set[int], bound: float = 0.1) -> set[int]:
        """Return the span ids of the steps of all traces of the ratio, and of the kept roots."""
        ratio = TraceIdRatioBased(bound)
        by_ratio = {
            root
            for root in self.steps
            if ratio.should_sample(None, identity.trace_id(root), "").decision.is_sampled()
        }
        return {identity.step_span_id(step) for root in by_ratio | kept for step in self.steps[root]}


def step_ids(spans: list[Span]) -> set[int]:
    return {int(span.span_id, 16) for span in spans if span.name.endswith(".step")}


# --- the variables


@pytest.mark.parametrize("name", ["traceidratio", "parentbased_traceidratio", " TraceIdRatio "])
@pytest.mark.parametrize("ratio", ["0", "0.1", "0.5", "1e-3", "1", "1.0", ""])
def test_a_ratio_is_read_as_the_sdk_reads_it(name: str, ratio: str) -> None:
    sdk = ParentBased(TraceIdRatioBased(float(ratio or 1)))
    ours = Sampling.from_environment({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": ratio})
    numbers = random.Random(7)
    ids = [0, (1 << 64) - 1, 1 << 64, (1 << 128) - 1, *(numbers.getrandbits(128) for _ in range(2000))]
    assert [ours.sends(trace_id) for trace_id in ids] == [
        sdk.should_sample(None, trace_id, "").decision.is_sampled() for trace_id in ids
    ]
    assert ours.sends_all is (float(ratio or 1) == 1)


def test_the_bound_of_any_ratio_is_the_sdks() -> None:
    numbers = random.Random(11)
    ratios = [0.0, 5e-324, 2.0**-65, 2.0**-64, 1 - 2.0**-53, 1.0]
    ratios += [numbers.random() for _ in range(2000)]
    ratios += [10 ** numbers.uniform(-25, 0) for _ in range(2000)]
    ratios += [count / 1000 for count in range(1001)]
    environ = {"OTEL_TRACES_SAMPLER": "traceidratio"}
    asked = [Sampling.from_environment({**environ, "OTEL_TRACES_SAMPLER_ARG": repr(one)}) for one in ratios]
    assert [one.bound for one in asked] == [TraceIdRatioBased(one).bound for one in ratios]


@pytest.mark.parametrize(
    ("environ", "description", "sends"),
    [
        ({}, "always_on", True),
        ({"OTEL_TRACES_SAMPLER": ""}, "always_on", True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, "parentbased_always_on", True),
        (
            {"OTEL_TRACES_SAMPLER": "always_off", "OTEL_TRACES_SAMPLER_ARG": "nothing of its own"},
            "always_off",
            False,
        ),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, "parentbased_always_off", False),
        (TENTH, "traceidratio 0.1", False),
    ],
)
def test_the_other_samplers(environ: dict[str, str], description: str, sends: bool) -> None:
    asked = Sampling.from_environment(environ)
    assert (asked.description, asked.sends((1 << 128) - 1), asked.sends_all, asked.keep) == (
        description,
        sends,
        sends,
        frozenset(),
    )


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"OTEL_TRACES_SAMPLER": "jaeger_remote"},
            "OTEL_TRACES_SAMPLER must be one of always_on, always_off, traceidratio, "
            "parentbased_always_on, parentbased_always_off, "
            "parentbased_traceidratio, got 'jaeger_remote'; unset it to send every trace",
        ),
        *(
            (
                {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": value},
                (
                    f"OTEL_TRACES_SAMPLER_ARG must be a ratio from 0 to 1, got '{value}'; try 0.1 for every "
                    "tenth trace"
                ),
            )
            for value in ("10%", "1.5", "-0.1", "nan")
        ),
        (
            {"OTEL_DFLASH_KEEP": "slow,failed"},
            (
                "OTEL_DFLASH_KEEP (--keep) takes slow, error, or slow,error, got 'slow,failed'; unset it "
                "to go by the sampler alone"
            ),
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Sampling.from_environment(environ)
    assert str(refused.value) == message


# --- slow


def test_a_step_is_slow_beyond_the_p99_by_nearest_rank_of_the_thousand_before_it() -> None:
    numbers = random.Random(3)
    window = sampling._Window.of(())
    seen: list[int] = []
    for _ in range(5000):
        duration = numbers.choice([numbers.randrange(1000), int(numbers.paretovariate(1) * 500)])
        before = sorted(seen[-1000:])
        rank = (99 * len(before) + 99) // 100  # the smallest with 99 % at or below
        wanted = len(before) >= 100 and duration > before[rank - 1]
        assert window.exceeds(duration) is wanted, len(seen)
        seen.append(duration)
    few = sampling._Window.of((25,) * 98)
    assert [few.exceeds(duration) for duration in (30, 40, 50, 40)] == [False, False, True, False]
    assert sampling._Window.of(tuple(window.recent)).ranked == window.ranked == sorted(seen[-1000:])


def test_slow_steps_and_their_producers_are_sent_whole_after_ten_minutes_in_the_queue(tmp_path: Path) -> None:
    slow = {"target": 700, "a": 130, "b": 131, "c": 800, "d": 1500}
    made = Pipeline(slow, {})
    directory = recorded(made.log, tmp_path / "run-1")
    assert len(list(directory.glob("segment-*"))) > 1
    spans, said = sent(directory, keep("slow"))
    numbers = [130, 131, 800, 1500]
    kept = {target.ring + number for number in numbers for target in (made.first, made.second)} | {
        made.first.ring + 700
    }
    assert step_ids(spans) == made.expected(kept)
    everything, nothing_said = sent(directory, None)
    by_trace = {span.trace_id for span in spans}
    assert {span.encoded for span in spans} - marked(spans) <= {
        span.encoded for span in everything if span.trace_id in by_trace
    }
    assert len(spans) == sum(span.trace_id in by_trace for span in everything), "whole traces only"
    assert nothing_said is None
    assert said == SampledSpans(
        sampler="traceidratio 0.1",
        keep=["slow"],
        left_out_spans=len(everything) - len(spans),
        kept_steps={"slow": 5, "error": 0, "truncated": 0},
        lost_traces=0,
    )


def marked(spans: list[Span]) -> set[bytes]:
    """Return the spans that say of an item that its trace is not sent."""
    return {
        span.encoded
        for span in spans
        for item in (*span.links, *span.events)
        if "dflash.trace.sampled" in item.attributes
    }


def test_failed_and_truncated_steps_are_sent_whatever_the_ratio(tmp_path: Path) -> None:
    failed = {"step": 3, "phase": 400, "truncated": 900}
    made = Pipeline({}, failed)
    directory = recorded(made.log, tmp_path / "run-1")
    kept = {target.ring + number for number in failed.values() for target in (made.first, made.second)}
    for environ, ratio in ((TENTH, 0.1), (OFF, 0.0)):
        spans, said = sent(directory, keep("error", environ))
        assert step_ids(spans) == made.expected(kept, ratio)
        assert said is not None
        assert said.kept_steps == {"slow": 0, "error": 2, "truncated": 1}
    cut = [span for span in spans if span.attributes.get("dflash.span.truncated")]
    assert [span.name for span in cut] == ["drafter.step"]


def test_what_is_kept_without_the_ratio_is_all_that_is_kept(tmp_path: Path) -> None:
    made = Pipeline({"a": 130}, {"step": 3})
    directory = recorded(made.log, tmp_path / "run-1")
    assert sent(directory, Sampling.from_environment(OFF))[0] == []
    assert len(step_ids(sent(directory, keep("slow,error", OFF))[0])) == 6
    assert sent(directory, keep("slow,error", {})) == sent(directory, None)


def test_a_link_to_a_trace_that_is_not_sent_says_so_on_the_link_and_its_event(tmp_path: Path) -> None:
    made = Pipeline({"a": 130}, {})
    spans, _ = sent(recorded(made.log, tmp_path / "run-1"), keep("slow"))
    there = {(span.trace_id, span.span_id) for span in spans}
    links = [link for span in spans for link in span.links]
    assert [
        link
        for link in links
        if ((link.trace_id, link.span_id) in there) is (link.attributes.get("dflash.trace.sampled") is False)
    ] == []
    assert 0 < sum((link.trace_id, link.span_id) in there for link in links) < len(links)
    for span in spans:
        if span.name == "drafter.queue_get":
            (step,) = [one for one in spans if one.span_id == span.parent_id]
            assert [event.attributes for event in span.events] == [link.attributes for link in step.links]


def test_the_traces_that_a_full_one_goes_on_in_share_its_fate(tmp_path: Path) -> None:
    directory = recorded(fan_out(), tmp_path / "run-1")
    low_word = identity.trace_id((1 << 28) + 1) & (1 << 64) - 1
    below, above = (str((low_word + step) / 2**64) for step in (-(1 << 40), 1 << 40))
    everything, _ = sent(directory, None)
    assert len({span.trace_id for span in everything}) > 400
    for ratio, wanted in ((below, []), (above, everything)):
        asked = Sampling.from_environment(
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": ratio}
        )
        assert [span.encoded for span in sent(directory, asked)[0]] == [span.encoded for span in wanted]


def test_two_nodes_send_the_same_traces_of_the_ratio_and_a_link_to_the_other_is_marked_by_it(
    tmp_path: Path,
) -> None:
    """What the drafters' node keeps beyond the ratio, the targets' node does not know of."""
    targets, drafters = Log(), Log()
    target, drafter = Recorder(targets, 1, "target"), Recorder(drafters, 3, "drafter")
    for number in range(1, 401):
        target.step(number, number, number + 1)
        drafter.consumed(
            number, number + 2, (target.ring + number, target.ring + number, number), fixed_root=True
        )
        drafter.step(number, number + 2, number + (30 if number == 222 else 4), root=target.ring + number)
    target.drain()
    drafter.drain()
    asked = keep("slow")
    ours, _ = sent(recorded(targets, tmp_path / "a"), asked)
    theirs, said = sent(recorded(drafters, tmp_path / "b"), asked)
    assert {span.trace_id for span in theirs} - {span.trace_id for span in ours} == {
        f"{identity.trace_id(target.ring + 222):032x}"
    }
    assert len(ours) == len(theirs) - 1 > 20
    unsent = [
        span for span in theirs for link in span.links if link.attributes.get("dflash.trace.sampled") is False
    ]
    assert [span.span_id for span in unsent] == [f"{identity.step_span_id(drafter.ring + 222):016x}"]
    assert said is not None
    assert (said.kept_steps["slow"], said.lost_traces) == (1, 0)


# --- what cannot be brought back


def test_traces_beyond_the_memory_are_counted_and_their_links_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Pipeline({"a": 130, "b": 1450}, {})
    directory = recorded(made.log, tmp_path / "run-1")
    monkeypatch.setattr(sampling, "LEFT_OUT_STEPS_MAX", 500)
    spans, said = sent(directory, keep("slow", OFF))
    assert said is not None
    assert said.lost_traces == 2
    drafter = made.drafter.ring
    wanted = {drafter + 130, drafter + 1450, made.first.ring + 1450, made.second.ring + 1450}
    assert step_ids(spans) == {identity.step_span_id(step) for step in wanted}, (
        "neither root is forgotten for a part of another trace"
    )
    (alone,) = [
        span
        for span in spans
        if span.name == "drafter.step" and int(span.span_id, 16) == identity.step_span_id(drafter + 130)
    ]
    assert [link.attributes["dflash.trace.sampled"] for link in alone.links] == [False, False]


def test_a_segment_that_was_removed_meanwhile_is_counted(tmp_path: Path) -> None:
    made = Pipeline({"a": 130, "b": 1450}, {})
    directory = recorded(made.log, tmp_path / "run-1")
    whole = sent(directory, keep("slow", OFF))[0]
    exporter = Spans()
    sink = SpanSink("test", exporter, directory, keep_cursor=False, sampling=keep("slow", OFF))
    files = sorted(directory.glob("segment-*"))
    while sink.reader.position < int(files[1].stem.split("-")[1]) + 10:
        for frame in sink.reader.read(1):
            assert sink._replay.add(frame) == []
    files[0].unlink()
    sink.deliver()
    sink.reader.close()
    assert sink.sampled is not None
    assert sink.sampled.lost_traces == 2
    assert len(step_ids(whole)) - len(step_ids(exporter.spans)) == 2


# --- a restart


def test_a_restart_at_any_frame_sends_the_same(tmp_path: Path) -> None:
    made = Pipeline({"a": 130, "b": 700}, {"step": 1400})
    directory = recorded(made.log, tmp_path / "run-1")
    asked = keep("slow,error")

    def open_at(position: int) -> tuple[RecordingReader, SpanReplay]:
        reader = RecordingReader(directory, position)
        return reader, SpanReplay(
            reader.info, reader.catalog, asked, Lookback(directory, None, reader.catalog)
        )

    got: list[NeutralSpan] = []
    reader, replay = open_at(0)
    while frames := reader.read(37):
        for frame in frames:
            got += replay.add(frame)
        state = replay.state()
        reader.close()
        reader, replay = open_at(reader.position)
        replay.restore(state)
        assert replay.state() == state
    reader.close()
    assert sorted(span.encoded for span in on_the_wire(got)) == sorted(
        span.encoded for span in sent(directory, asked)[0]
    )


def test_a_sink_that_dies_at_any_export_repeats_at_most_a_batch_and_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before the export, after it, or with the state saved and the cursor not; the state is older
    than the cursor most times."""
    made = Pipeline({"a": 130, "b": 700}, {"step": 1400})
    directory = recorded(made.log, tmp_path / "run-1")
    asked = keep("slow,error")
    wanted = sorted(span.encoded for span in sent(directory, asked)[0])
    monkeypatch.setattr(span_sink, "FLUSH_RECORDS", 300)
    monkeypatch.setattr(span_sink, "STATE_SHARE", 0.5)
    state, cursor = (directory / f"cursor-spans-test.{suffix}" for suffix in ("state", "json"))
    exporter = Dying()
    deaths = between = 0
    while True:
        position = int.from_bytes(state.read_bytes()[:8], "little") if state.exists() else 0
        # as if it died between the two
        if position and position == json.loads(cursor.read_bytes())["position"]:
            cursor.write_text(json.dumps({"position": position - 3, "delivered": 7}))
            between += 1
        sink = SpanSink("test", exporter, directory, sampling=asked)
        exporter.lives = 1 + deaths % 3
        try:
            sink.deliver()
            break
        except Death:
            deaths += 1
        finally:
            sink.reader.close()
    assert between > 3
    assert deaths > between + 3
    by_id = {span.span_id: span.encoded for span in exporter.spans}
    assert sorted(by_id.values()) == wanted
    assert {(span.span_id, span.encoded) for span in exporter.spans} == set(by_id.items()), (
        "a repeated span is byte-identical"
    )


class Death(BaseException):
    """As sudden as SIGKILL: nothing of the sink runs after it."""


class Dying(Spans):
    """Dies at every so manieth export, after or before it took the spans."""

    lives = 1

    def export(self, spans: Any) -> SpanExportResult:
        self.lives -= 1
        if self.lives < 0:
            if len(self.spans) % 2:
                super().export(spans)
            raise Death
        return super().export(spans)
