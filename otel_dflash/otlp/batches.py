"""Spans and metric points in requests of a size that receivers accept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

ITEMS_PER_BATCH: Final = 512
BYTES_PER_BATCH: Final = 1 << 20  # a gRPC receiver takes 4 MiB unless configured otherwise

_Item = TypeVar("_Item")


def batches(
    items: Iterable[_Item],
    bytes_of: Callable[[_Item], int],
    bytes_max: int = BYTES_PER_BATCH,
    count_max: int = ITEMS_PER_BATCH,
) -> Iterator[list[_Item]]:
    """Yield batches of at most `count_max` items and about `bytes_max` bytes.

    A larger item is a batch of its own.
    """
    batch: list[_Item] = []
    size = 0
    for item in items:
        item_bytes = bytes_of(item)
        if batch and (len(batch) >= count_max or size + item_bytes > bytes_max):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item_bytes
    if batch:
        yield batch
