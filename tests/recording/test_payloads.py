from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from otel_dflash.recording.frames import Frame, FrameKind
from otel_dflash.recording.payloads import (
    AGENT_CPU,
    RING_FILL,
    Closed,
    Open,
    PayloadError,
    Sample,
    Series,
    decode_samples,
    decode_series,
    encode_series,
    lag_series,
    lag_sink,
)
from otel_dflash.recording.reader import RecordingReader
from otel_dflash.recording.run_info import create_recording
from otel_dflash.recording.segments import segments
from otel_dflash.recording.writer import RecordingWriter
from tests.recording.logbook import INFO, RING, start

CLOSED = Closed(17, True, (Open(3, 5), Open(2, 6)), Open((7 << 28) + 1, 4))
POWER = Series("nvml", "power_w", (("gpu", "GPU-1"), ("sensor", "é")))


@pytest.mark.parametrize(
    "closed", [CLOSED, Closed(0, False, (), None), Closed((1 << 64) - 1, True, (), None)]
)
def test_the_end_of_a_ring_comes_back(closed: Closed) -> None:
    assert Closed.decode(closed.encode()) == closed


@pytest.mark.parametrize(
    "change",
    [
        {"end_ns": -1},
        {"end_ns": 1 << 64},
        {"end_ns": 1.5},
        {"end_ns": True},
        {"killed": 1},
        {"open": {}},
        {"open": [[1]]},
        {"open": [[1, "2"]]},
        {"open": [[1, -2]]},
        {"open": None},
        {"step": 5},
        {"step": [1, 2, 3]},
    ],
)
def test_what_is_not_the_end_of_a_ring_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PayloadError):
        Closed.decode(json.dumps({**json.loads(CLOSED.encode()), **change}))


def test_damaged_bytes_raise_one_error_or_decode() -> None:
    chance = random.Random(1)
    series = encode_series({0: AGENT_CPU, 5: POWER, 6: lag_series("spans")})
    refused = 0
    for whole, decode in ((CLOSED.encode(), Closed.decode), (series, decode_series)):
        for _ in range(3000):
            data = bytearray(whole)
            for _ in range(chance.choice((1, 2, 20))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            try:
                decode(bytes(data[: chance.choice((len(data), chance.randrange(len(data))))]))
            except PayloadError:
                refused += 1
    assert 5000 < refused < 6000
    for hostile in (b"[" * 100_000, b"", b"null", b"3", b'{"end_ns": 1}'):
        for decode in (Closed.decode, decode_series):
            with pytest.raises(PayloadError):
                decode(hostile)
    with pytest.raises(PayloadError, match="21 bytes of samples"):
        decode_samples(bytes(21), {})


def test_the_lag_of_a_sink_is_told_from_other_series() -> None:
    assert [lag_sink(series) for series in (lag_series("spans"), AGENT_CPU, POWER)] == ["spans", None, None]


# --- samples in a recording


def samples_of(directory: Path, position: int = 0, limit: int = 3) -> list[tuple[int, Sample]]:
    """Return (ring, sample) as a reader finds them."""
    reader = RecordingReader(directory, position)
    found = []
    while frames := reader.read(limit):
        for frame in frames:
            if frame.kind == FrameKind.SAMPLES:
                found += [(frame.ring, one) for one in decode_samples(frame.payload, reader.catalog.series)]
    reader.close()
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_recording(tmp_path / "run-1", INFO)
    return tmp_path / "run-1"


def test_samples_come_back_and_their_series_are_described_once(directory: Path) -> None:
    writer = start(directory)
    cpu, power = Sample(AGENT_CPU, 18, 1.5e12), Sample(POWER, 17, 0.1)
    writer.append_samples([cpu, power], 20)
    writer.append_samples([Sample(RING_FILL, 21, 0.25)], 21, RING)
    writer.append_samples([power, cpu, power], 22)
    writer.close()
    again = RecordingWriter(directory, 1 << 30)
    again.append_samples([Sample(POWER, 30, -1.0), Sample(lag_series("spans"), 30, 2.0)], 30)
    again.close()
    assert samples_of(directory) == [
        (0, cpu),
        (0, power),
        (RING, Sample(RING_FILL, 21, 0.25)),
        (0, power),
        (0, cpu),
        (0, power),
        (0, Sample(POWER, 30, -1.0)),
        (0, Sample(lag_series("spans"), 30, 2.0)),
    ]
    reader = RecordingReader(directory)
    described = [(frame.count, frame.time_ns) for frame in reader.read() if frame.kind == FrameKind.SERIES]
    reader.close()
    assert described == [(2, 20), (1, 21), (1, 30)]


def test_a_segment_alone_and_any_place_in_it_says_what_its_samples_are(directory: Path) -> None:
    writer = start(directory, segment_bytes=2000)
    everything = [Sample(AGENT_CPU if second % 2 else POWER, second, float(second)) for second in range(100)]
    for sample in everything:
        writer.append_samples([sample], sample.time_ns)
    writer.close()
    (_, oldest), *_, (newest, _) = segments(directory)
    oldest.unlink()
    rest = [sample for _, sample in samples_of(directory)]
    assert 0 < len(rest) < 100
    assert rest == everything[-len(rest) :]
    assert samples_of(directory, newest + 8)[-1] == (0, everything[-1])


def test_a_description_that_was_lost_never_gives_samples_another_meaning(
    directory: Path,
) -> None:
    writer = start(directory)
    writer.append_samples([Sample(AGENT_CPU, 1, 1.0)], 1)
    writer.close()
    path = segments(directory)[-1][1]
    data = bytearray(path.read_bytes())
    data[data.index(b"cpu_ns")] ^= 1
    path.write_bytes(data)
    again = start(directory)
    again.append_samples([Sample(POWER, 2, 2.0), Sample(AGENT_CPU, 2, 3.0)], 2)
    again.close()
    known = [(0, Sample(POWER, 2, 2.0)), (0, Sample(AGENT_CPU, 2, 3.0))]
    assert samples_of(directory, limit=1) == known
    assert samples_of(directory, limit=100) == [(0, Sample(AGENT_CPU, 1, 1.0)), *known]  # described by then
    with pytest.raises(PayloadError):
        decode_series(Frame(0, FrameKind.SERIES, 0, 0, 1, 0, b'[[1, "a"]]').payload)
