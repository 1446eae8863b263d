"""The monitor thread: one line per interval, from numbers the workers publish. It never blocks one."""

from __future__ import annotations

import sys
import threading
import time

from pipeline import Pipeline
from tqdm import tqdm


class Monitor(threading.Thread):
    """Logs tokens/s, loss, queues and section timings to stderr every `interval` seconds, and at the end."""

    def __init__(self, pipeline: Pipeline, interval: float) -> None:
        super().__init__(name="monitor", daemon=True)
        self.pipeline, self.interval = pipeline, interval
        self.ended = threading.Event()

    def run(self) -> None:
        then, tokens_then = time.perf_counter(), 0
        while True:
            last = self.ended.wait(self.interval)
            now, tokens = time.perf_counter(), sum(drafter.tokens for drafter in self.pipeline.drafters)
            tqdm.write(self.line((tokens - tokens_then) / (now - then)), file=sys.stderr)
            then, tokens_then = now, tokens
            if last:
                return

    def line(self, tokens_per_second: float) -> str:
        pipeline = self.pipeline
        loss = pipeline.work.newest_loss
        parts = [
            f"step {len(pipeline.finished)}/{pipeline.steps}",
            f"{tokens_per_second:.0f} tokens/s",
            f"loss {'-' if loss is None else format(float(loss), '.3f')}",
            f"hidden states {pipeline.hidden_states.qsize()}/{pipeline.hidden_states.maxsize}",
            f"prefetched {pipeline.prefetched.qsize()}/{pipeline.prefetched.maxsize}",
            *(f"{timing}" for timing in self.timings()),
        ]
        return "[monitor] " + ", ".join(parts)

    def timings(self) -> list[str]:
        """Return the newest profile snapshots, each section's mean over the workers of its role."""
        sums: dict[str, list[float]] = {}
        for worker in self.pipeline.workers:
            for section, mean_ms in worker.timings_ms.items():
                sums.setdefault(f"{worker.role}.{section}_ms", []).append(mean_ms)
        return [f"{name} {sum(means_ms) / len(means_ms):.1f}" for name, means_ms in sums.items()]

    def end(self) -> None:
        self.ended.set()
        self.join(5)
