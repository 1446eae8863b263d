"""The payloads of CLOSED, OPEN, SERIES and SAMPLES frames, encoded and decoded here only.

An OPEN frame is 8-byte words (little endian): the capture detail, then for each ring its id, the id and start
of its open step (0, 0 if none), the number of open phases, and the name id and start of each.

A sample is 20 bytes (little endian): 4 series id, 8 time (monotonic ns), 8 value (IEEE double). A series is
described once, in a SERIES frame before its first sample; every segment repeats the descriptions.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from otel_dflash.records import WORD_BYTES, WORD_MASK

_SAMPLE: Final = struct.Struct("<IQd")
_NO_STEP: Final = (0, 0)


class PayloadError(ValueError):
    """A payload that is damaged or malformed. Readers count it and continue."""


class Open(NamedTuple):
    """A phase, by its name id, or a step, by its id, that has not ended."""

    id: int
    start_ns: int  # monotonic


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a ring, and what was still open at that time."""

    end_ns: int  # monotonic; of a killed worker, its last sign of life
    killed: bool
    open: tuple[Open, ...]  # phases, outermost first
    step: Open | None
    unseen: bool = False  # killed while no agent was running: it may have lived longer

    def encode(self) -> bytes:
        """Return the payload of a CLOSED frame."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, payload: bytes | str) -> Closed:
        """Return what `encode` wrote.

        Raises:
            PayloadError: A field is missing or malformed.
        """
        match _json(payload):
            case {
                "end_ns": end_ns,
                "killed": bool() as killed,
                "unseen": bool() as unseen,
                "open": list() as phases,
                "step": step,
            } if is_word(end_ns):
                open_step = None if step is None else _open(step)
                return cls(end_ns, killed, tuple(map(_open, phases)), open_step, unseen)
        raise PayloadError("not the end of a ring")


class OpenWork(NamedTuple):
    """What was open in a ring at one time."""

    step: Open | None
    phases: tuple[Open, ...]  # outermost first


def encode_open(detail: int, rings: Mapping[int, OpenWork]) -> bytes:
    """Return the payload of an OPEN frame: the capture detail, and what was open by ring."""
    words = [detail]
    for ring, (step, phases) in rings.items():
        words += ring, *(step or _NO_STEP), len(phases)
        for phase in phases:
            words += phase
    return struct.pack(f"<{len(words)}Q", *words)


def decode_open(payload: bytes) -> tuple[int, dict[int, OpenWork]]:
    """Return what `encode_open` was given.

    Raises:
        PayloadError: The payload was cut.
    """
    rings: dict[int, OpenWork] = {}
    try:
        detail, *words = struct.unpack(f"<{len(payload) // WORD_BYTES}Q", payload)
        while words:
            (ring, step, step_start_ns, count), words = words[:4], words[4:]
            found, words = words[: 2 * count], words[2 * count :]
            phases = tuple(map(Open, found[::2], found[1::2]))
            if len(found) != 2 * count:
                raise ValueError(f"{len(phases)} of {count} phases")
            rings[ring] = OpenWork(Open(step, step_start_ns) if step else None, phases)
    except (struct.error, ValueError) as error:
        raise PayloadError(f"{len(payload)} bytes of open work: {error}") from None
    return detail, rings


class Series(NamedTuple):
    """What a number is: who reads it, its name with the unit, and what tells it from others of that name."""

    source: str
    name: str
    attributes: tuple[tuple[str, str], ...] = ()


class Sample(NamedTuple):
    """One number at one time. The frame states its ring, 0 for none."""

    series: Series
    time_ns: int  # monotonic
    value: float


def series_id(series: Series, taken: Container[int]) -> int:
    """Return the id of a new series, unlike those `taken`.

    It is a hash of the description: a series whose description was lost gets the same id again, and no other
    gets that id. A reader knows the descriptions of a few frames before it reads their samples.
    """
    number = zlib.crc32(encode_series({0: series}))
    while number in taken:
        number = (number + 1) % (1 << 32)
    return number


def encode_series(series: Mapping[int, Series]) -> bytes:
    """Return the payload of a SERIES frame: series by id, 0 <= id < 2**32."""
    return json.dumps(
        [[number, source, name, dict(attributes)] for number, (source, name, attributes) in series.items()]
    ).encode()


def decode_series(payload: bytes) -> dict[int, Series]:
    """Return what `encode_series` wrote.

    Raises:
        PayloadError: An entry is not a series.
    """
    entries = _json(payload)
    if not isinstance(entries, list):
        raise PayloadError("not a list of series")
    return dict(map(_series, entries))


def encode_samples(samples: Sequence[Sample], ids: Mapping[Series, int]) -> bytes:
    """Return the payload of a SAMPLES frame; `ids` holds the series of every sample."""
    return b"".join(_SAMPLE.pack(ids[sample.series], sample.time_ns, sample.value) for sample in samples)


def decode_samples(payload: bytes, series: Mapping[int, Series]) -> list[Sample]:
    """Return what `encode_samples` wrote, without samples of series whose description was lost.

    Raises:
        PayloadError: The payload is not a whole number of samples.
    """
    if len(payload) % _SAMPLE.size:
        raise PayloadError(f"{len(payload)} bytes of samples")
    return [
        Sample(series[number], time_ns, value)
        for number, time_ns, value in _SAMPLE.iter_unpack(payload)
        if number in series
    ]


# What the agent measures about itself, each second. A frame of ring 0 holds all figures of one moment.
AGENT: Final = "agent"
AGENT_CPU: Final = Series(AGENT, "cpu_ns")  # since the agent started
WALL_OFFSET: Final = Series(AGENT, "wall_offset_ns")  # wall clock minus anchored time
RECORD_COST: Final = Series(AGENT, "record_cost_ns")  # of one record in the trainer, as calibrated
UNRECORDED_STEPS: Final = Series(
    AGENT, "unrecorded_steps"
)  # of workers without a ring, since the session began
RING_FILL: Final = Series(AGENT, "fill_ratio")  # of the frame's ring: largest since the sample before
_LAG: Final = "lag_s"
_SINK: Final = "sink"


def lag_series(sink: str) -> Series:
    """Return the series of the age of the newest record that a sink has delivered."""
    return Series(AGENT, _LAG, ((_SINK, sink),))


def lag_sink(series: Series) -> str | None:
    """Return the sink whose `lag_series` this is, None for another series."""
    return dict(series.attributes).get(_SINK) if series.name == _LAG else None


def _json(payload: bytes | str) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"not JSON: {error}") from None


def is_word(value: object) -> bool:
    """Return whether a value of a payload is an int of 0 to 2**64 - 1."""
    return type(value) is int and 0 <= value <= WORD_MASK


def _series(entry: Any) -> tuple[int, Series]:
    match entry:
        case [number, str() as source, str() as name, dict() as attributes] if is_word(number) and all(
            isinstance(value, str) for value in attributes.values()
        ):
            return number, Series(source, name, tuple(attributes.items()))
    raise PayloadError("not a series")


def _open(entry: Any) -> Open:
    match entry:
        case [number, start_ns] if is_word(number) and is_word(start_ns):
            return Open(number, start_ns)
    raise PayloadError("not a phase or step")
