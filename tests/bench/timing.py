"""Timing shared by the benches: variants interleaved round by round, medians and spread, the baseline in the
same run."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from time import perf_counter_ns

ROUNDS = 15


def per_call_ns(
    variants: Mapping[str, Callable[[], int]],
    before: Callable[[], object] = lambda: None,
    rounds: int = ROUNDS,
) -> dict[str, list[float]]:
    """Return ns per call of each variant and round. A variant runs one burst and returns its number of calls.

    `before` runs before each burst and is not timed. Garbage collection is off meanwhile: one variant must
    not pay for another.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, burst in variants.items():
            before()
            gc.collect()
            gc.disable()
            t0 = perf_counter_ns()
            calls = burst()
            spent_ns = perf_counter_ns() - t0
            gc.enable()
            if turn:  # the first round warms up
                samples[name].append(spent_ns / calls)
    return samples


def table(
    title: str, samples: Mapping[str, list[float]], baseline: str, bars: Mapping[str, str], unit: str = "ns"
) -> None:
    """Print median, spread and ratio to the baseline of each variant, and the bar it is held to."""
    print(f"\n{title}")
    print(f"{'variant':44} {'median ' + unit:>11} {'min - max':>19} {'/ ' + baseline:>22}  bar")
    base = statistics.median(samples[baseline])
    for name, values in samples.items():
        median = statistics.median(values)
        spread = f"{min(values):.0f} - {max(values):.0f}"
        print(f"{name:44} {median:11.0f} {spread:>19} {median / base:22.2f}  {bars.get(name, '')}")


def machine() -> str:
    """Return one line that says where the numbers come from."""
    return (
        f"Python {sys.version.split()[0]}, {platform.machine()}, {os.cpu_count()} CPUs, Linux "
        f"{platform.release()}"
    )
