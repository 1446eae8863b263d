"""4 x 4 threads and 20 000 items: not one record names another producer than the item itself does."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_dflash import Worker
from tests.agent.rings import Rig, recording
from tests.trainer.queue_kinds import KINDS, Item, QueueKind

PRODUCERS = CONSUMERS = 4
ITEMS = 20_000
STEP_PUTS, STEP_GETS = 5, 3


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("OTEL_DFLASH_RING_BYTES", str(1 << 21))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    try:
        with recording(tmp_path) as rig:
            yield rig
    finally:
        sys.setswitchinterval(interval_s)


class Pipeline:
    """Producers and consumers on one queue."""

    def __init__(self, kind: QueueKind, rig: Rig) -> None:
        self.kind = kind
        self.queue = kind.wrap(rig.telemetry, kind.make(0 if kind.make in (queue.PriorityQueue,) else 256))
        self.producers = [rig.telemetry.worker("target", index) for index in range(PRODUCERS)]
        self.consumers = [rig.telemetry.worker("drafter", index) for index in range(CONSUMERS)]
        # per consumer, in order: own step, the item's word
        self.links: list[list[tuple[int, int]]] = [[] for _ in self.consumers]
        self.failures: list[BaseException] = []

    def produce(self, worker: Worker) -> None:
        for first in range(0, ITEMS // PRODUCERS, STEP_PUTS):
            with worker.step() as step:
                for number in range(first, first + STEP_PUTS):
                    self.queue.put(Item(bucket=number % 4, producer=step.id))

    def consume(self, worker: Worker) -> None:
        links = self.links[worker.index]
        while sum(map(len, self.links)) < ITEMS:
            with worker.step() as step:
                try:
                    for _ in range(STEP_GETS):
                        links += [
                            (step.id, item.producer) for item in self.kind.take(self.queue, timeout=0.02)
                        ]
                except queue.Empty:
                    pass

    def run(self) -> None:
        threads = [
            threading.Thread(target=self.guard, args=(self.produce, worker)) for worker in self.producers
        ]
        threads += [
            threading.Thread(target=self.guard, args=(self.consume, worker)) for worker in self.consumers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not [thread for thread in threads if thread.is_alive()]
        assert self.failures == []

    def guard(self, loop: object, worker: Worker) -> None:
        try:
            loop(worker)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001  shown by the test
            self.failures.append(error)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_no_mismatch(kind: QueueKind, rig: Rig) -> None:
    pipeline = Pipeline(kind, rig)
    pipeline.run()
    assert sum(map(len, pipeline.links)) == ITEMS
    assert [
        [record.link for record in rig.consumed(worker)] for worker in pipeline.consumers
    ] == pipeline.links
    assert rig.counted(*pipeline.producers, *pipeline.consumers) == {}
