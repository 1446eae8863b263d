from __future__ import annotations

import json
import math
from bisect import bisect_left
from decimal import Decimal, localcontext

import numpy as np
import pytest

from otel_dflash.metrics.histogram import SCALE, Histogram, bucket_indices, group


def boundary_ns(index: int) -> int:
    """Return the largest whole ns that is not above 2**(index / 64) s, in exact arithmetic."""
    with localcontext() as context:
        context.prec = 60
        return int(Decimal(10**9) * Decimal(2) ** (Decimal(index) / Decimal(1 << SCALE)))


def nearest_rank(durations: list[int], q: float) -> int:
    return sorted(durations)[max(1, math.ceil(q * len(durations))) - 1]


def test_every_bucket_boundary_up_to_an_hour_is_exact_and_upper_inclusive() -> None:
    first = -1914  # 1 ns is above it
    uppers = [boundary_ns(index) for index in range(first, 800)]
    values = sorted({ns + step for ns in uppers for step in (0, 1) if 0 < ns + step < 3_600_000_000_000})
    assert bucket_indices(np.array(values, np.uint64)).tolist() == [
        first + bisect_left(uppers, ns) - 1 for ns in values
    ]


def test_indices_are_those_of_the_sdk() -> None:
    mapping = pytest.importorskip(
        "opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping"
    )
    sdk = mapping.LogarithmMapping(SCALE)
    random = np.random.default_rng(1)
    values = np.unique((10 ** random.uniform(0, 15, 20_000)).astype(np.uint64))
    values = np.concatenate(
        (values, 10**9 * 2 ** np.arange(13, dtype=np.uint64), 10**9 // 2 ** np.arange(10, dtype=np.uint64))
    )
    assert bucket_indices(values).tolist() == [sdk.map_to_index(int(value) / 1e9) for value in values]


def test_add_counts_everything_exactly() -> None:
    histogram = Histogram()
    histogram.add([0, 1_000_000_000, 20_000_000, 20_000_000, 0])
    histogram.add([])
    assert histogram.to_dict() == {
        "count": 5,
        "sum": 1_040_000_000,
        "min": 0,
        "max": 1_000_000_000,
        "zero": 2,
        "buckets": [[-362, 2], [-1, 1]],
    }
    assert histogram.dense() == (-362, [2, *[0] * 360, 1])
    assert Histogram().dense() == (0, [])


def test_sums_beyond_64_bits_stay_exact() -> None:
    huge = (1 << 63) - 1
    histogram = Histogram()
    histogram.add([huge] * 5 + [1])
    assert histogram.sum_ns == 5 * huge + 1


def test_merging_parts_equals_the_whole() -> None:
    random = np.random.default_rng(2)
    values = (10 ** random.uniform(3, 10, 3_000)).astype(np.uint64)
    whole, merged = Histogram(), Histogram()
    whole.add(values)
    for part in np.array_split(values, 7):
        piece = Histogram()
        piece.add(part)
        merged.merge(piece)
    merged.merge(Histogram())
    assert merged == whole
    assert Histogram.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_group_keeps_keys_apart() -> None:
    keys = np.array([7, 3, 7, 3, 9], np.uint64)
    durations = np.array([10, 20, 30, 0, 50], np.uint64)
    expected: dict[int, Histogram] = {}
    for key, duration in zip(keys.tolist(), durations.tolist(), strict=True):
        expected.setdefault(key, Histogram()).add([duration])
    assert group(keys, durations) == expected
    assert group(keys[:0], durations[:0]) == {}


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_a_bucket_of_the_nearest_rank(seed: int) -> None:
    random = np.random.default_rng(seed)
    compiled = [12_000_000_000]
    shapes = {
        "uniform": random.integers(1_000, 10**9, 5_000).tolist(),
        "bimodal with a compile": random.normal(20e6, 1e6, 4_000).astype(int).tolist()
        + random.normal(900e6, 5e6, 1_000).astype(int).tolist()
        + compiled,
        "few": random.integers(10, 10**6, 3).tolist(),
        "one": compiled,
    }
    for shape, durations in shapes.items():
        histogram = Histogram()
        histogram.add(durations)
        for q in (0.0, 0.01, 0.5, 0.79, 0.81, 0.9, 0.99, 0.999, 1.0):
            assert histogram.quantile(q) == pytest.approx(nearest_rank(durations, q), rel=0.0055, abs=1), (
                shape,
                q,
            )


def test_quantiles_stay_inside_what_was_seen() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) == 0
    histogram.add([20_000_000] * 3)
    assert [histogram.quantile(q) for q in (0, 0.5, 1)] == [20_000_000] * 3
    histogram.add([0] * 7)
    assert [histogram.quantile(q) for q in (0, 0.5, 0.7, 1)] == [0, 0, 0, 20_000_000]
