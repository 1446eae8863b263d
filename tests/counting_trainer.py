"""A trainer for tests: does what each line on stdin says, answers with a line, and counts what it did by
plain integers.

steps N   N rounds of a target step and a drafter step that takes the target's item -> "done"
more      a further worker does one step -> "done"
hang      enters a step and nested phases of the target and stays there -> the times it read around that, as
JSON end       closes -> the counts, as JSON
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections import Counter
from typing import Any

import otel_dflash


def main() -> None:
    telemetry = otel_dflash.start()
    target = telemetry.worker("target", 0, gpu=0)
    drafter = telemetry.worker("drafter", 0, gpu=5)
    items: queue.Queue[int] = telemetry.wrap_queue(queue.Queue(), "hidden_states")
    counts: Counter[str] = Counter()

    def work(number: int) -> None:
        with target.step() as step:
            with target.model_forward:
                counts["target.model_forward"] += 1
            with target.queue_put:
                counts["target.queue_put"] += 1
                items.put(number)
            step.set(tokens=number % 7)
            counts["tokens"] += number % 7
        counts["target.step"] += 1
        with drafter.step() as step:
            with drafter.queue_get:
                counts["drafter.queue_get"] += 1
                items.get()
            with drafter.phase("outer"):
                counts["drafter.outer"] += 1
                with drafter.forward:
                    counts["drafter.forward"] += 1
            step.set(note=number)
        counts["drafter.step"] += 1
        counts["items"] += 1

    answer("ready")
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "steps":
            for _ in range(int(argument)):
                work(counts["target.step"])
            answer("done")
        elif command == "more":
            worker = telemetry.worker("postprocess", counts["postprocess.step"])
            with worker.step(), worker.d2h:
                counts["postprocess.d2h"] += 1
            counts["postprocess.step"] += 1
            worker.close()
            answer("done")
        elif command == "hang":
            hang(telemetry, target)
        elif command == "end":
            telemetry.close()
            counts["ended_ns"] = time.monotonic_ns()
            answer(counts)
            return


def hang(telemetry: otel_dflash.Telemetry, target: otel_dflash.Worker) -> None:
    times = [time.monotonic_ns()]
    with target.step(), target.phase("outer"):
        times.append(time.monotonic_ns())
        with target.model_forward:
            pass
        with target.phase("inner", "lock_wait"):
            times.append(time.monotonic_ns())
            answer(times)
            sys.stdin.read()


def answer(value: Any) -> None:
    print(value if isinstance(value, str) else json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
