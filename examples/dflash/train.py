"""Train a tiny DFlash drafter with a threaded pipeline: `python examples/dflash/train.py`, under a minute on
two cores.

Lines that exist for telemetry end in `# telemetry`; without them the script does the same.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flags import parse
from monitor import Monitor
from pipeline import BucketQueue, Item, Pipeline, Work
from simulate import SECONDS, SimulatedWork
from tqdm import tqdm

import otel_dflash  # telemetry

if TYPE_CHECKING:
    from work import TorchWork

ACCEPTANCE_LENGTH_MIN = 1.5


def bar(total: int, what: str) -> tqdm[Any]:
    """Return a progress bar on stderr, silent where that isn't a terminal."""
    return tqdm(total=total, desc=what, unit="step", file=sys.stderr, disable=None, leave=False)


def run_pipeline(flags: argparse.Namespace, work: Work) -> Pipeline:
    """Run the pipeline to its end and print its throughput."""
    capacity, ready = flags.capacity, None if flags.deterministic else flags.min_ready
    hs: queue.Queue[Item] = BucketQueue(capacity, ready) if ready else queue.Queue(capacity)
    hs = otel_dflash.start().wrap_queue(hs, "hidden_states", capacity=capacity, min_ready=ready)  # telemetry
    pipeline = Pipeline(
        work,
        hs,
        targets=flags.targets,
        drafters=flags.drafters,
        steps=flags.steps,
        accumulate=flags.accumulate,
        slow=flags.slow,
        profile_interval=flags.profile_interval,
        gpus=flags.simulate,
    )
    monitor = Monitor(pipeline, flags.log_interval)
    monitor.start()
    try:
        with bar(flags.steps, "drafter") as progress:
            seconds = pipeline.run(lambda finished: progress.update(finished - progress.n))
    finally:
        monitor.end()
    tokens = sum(drafter.tokens for drafter in pipeline.drafters)
    workers = f"{flags.targets} target and {flags.drafters} drafter workers"
    print(
        f"drafter            {len(pipeline.finished)} steps in {seconds:.1f} s, {tokens / seconds:.0f} "
        f"tokens/s ({workers})"
    )
    return pipeline


def write_counts(flags: argparse.Namespace, pipeline: Pipeline, weights_sha256: str | None) -> None:
    """Write what was executed, counted by plain integers: telemetry must report the same."""
    if flags.counts is None:
        return
    phases: dict[str, dict[str, dict[str, int]]] = {}
    steps: dict[str, dict[str, int]] = {}  # steps begun: a run stops its targets in the middle of one
    for worker in pipeline.workers:
        phases.setdefault(worker.role, {})[str(worker.index)] = worker.counts
        steps.setdefault(worker.role, {})[str(worker.index)] = worker.steps
    finished = [step._asdict() for step in sorted(pipeline.finished, key=lambda step: step.step)]
    counts = {"phases": phases, "steps": steps, "drafter_steps": finished, "weights_sha256": weights_sha256}
    flags.counts.write_text(json.dumps(counts, indent=1) + "\n")


def simulate(flags: argparse.Namespace) -> int:
    print(
        "simulated          sleeps in place of device work (ms): "
        + ", ".join(f"{name} {1000 * s:g}" for name, s in SECONDS.items())
    )
    pipeline = run_pipeline(flags, SimulatedWork(flags.seed))
    print("simulated          nothing was trained or decoded")
    write_counts(flags, pipeline, weights_sha256=None)
    return 0


def train(flags: argparse.Namespace) -> int:
    import torch  # here: a simulated run does without, and a wrong flag is answered before the import
    from work import TorchWork

    if flags.deterministic:
        torch.use_deterministic_algorithms(True)
    # for each Python thread. A model so small gains little from more, and the workers share the cores.
    torch.set_num_threads(1)
    work = TorchWork(flags.text, flags.seed, flags.steps, flags.accumulate)
    start = time.perf_counter()
    with bar(flags.teach_steps, "target") as progress:
        work.prepare(flags.teach_steps, lambda step: progress.update(1))
    seconds = time.perf_counter() - start
    print(
        f"target             taught {flags.teach_steps} steps on {len(work.text)} bytes, and wrote its "
        f"samples, in {seconds:.1f} s"
    )
    before = work.held_out_loss()

    pipeline = run_pipeline(flags, work)
    write_counts(flags, pipeline, work.weights_sha256())
    return report(flags, work, before)


def report(flags: argparse.Namespace, work: TorchWork, before: float) -> int:
    """Print how well the drafter works; return the exit code."""
    print(f"held-out loss      {before:.3f} before, {work.held_out_loss():.3f} after")
    speculation = work.decode(flags.decode_tokens)
    detail = (
        f"accepted draft tokens + 1, mean of {speculation.verifications} verifications, block of "
        f"{work.shared.block}"
    )
    print(f"acceptance length  {speculation.acceptance_length:.2f} ({detail})")
    answer = "yes, equal to" if speculation.lossless else "NO, not equal to"
    print(
        f"lossless           {answer} greedy decoding of the target ({speculation.tokens} tokens, both "
        "in float64)"
    )
    if not speculation.lossless:
        return 1
    if flags.default_steps and speculation.acceptance_length <= ACCEPTANCE_LENGTH_MIN:
        print(f"the acceptance length should be above {ACCEPTANCE_LENGTH_MIN}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parse(arguments)
    try:
        return simulate(flags) if flags.simulate else train(flags)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001  the program's edge: show it, exit 1
        traceback.print_exception(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
