"""Ids are frozen: another process, host or version computes the same from a context."""

from __future__ import annotations

from otel_dflash.spans import identity


def test_mix_is_the_published_splitmix64_finalizer() -> None:
    state = 0
    outputs = []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        outputs.append(identity.mix(state))
    # reference splitmix64.c, seed 0
    assert outputs == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_ids_are_the_ones_of_the_first_version() -> None:
    first = (1 << 28) + 1
    assert identity.trace_id(first) == 0x8E77942936AC6DF484E2559C6829D70F
    assert identity.step_span_id(first) == 0xC8B1D9017931EDEF
    assert identity.phase_span_id(identity.ring_key(1 << 28), 7) == 0x7F10993152419DD8


def test_no_id_is_zero() -> None:
    """Zero is no id in OTLP; exactly one word per key would give it."""
    assert identity.step_span_id(0xA4093822299F31D0) == 1
    assert identity.phase_span_id(0x082EFA98EC4E6C89, 0) == 1
