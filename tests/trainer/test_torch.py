"""Telemetry around and inside compiled functions, and beside seeded random streams.

Around a compiled call a phase costs the compiler nothing. Inside one, dynamo (torch 2.15) does not enter a
phase: "Unsupported context manager". It says so once and runs that one function eagerly from then on, with
the same result; what it calls is still compiled. The no-op phases of `Telemetry()` are traced through and
cost not even that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from otel_dflash import Telemetry, Worker
from otel_dflash.records import Kind
from tests.agent.rings import RingFile, recording

THREADS = 4
CALLS = 25


@pytest.fixture(params=["started", "off"])
def telemetry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Telemetry]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        if request.param == "off":
            yield Telemetry()
        else:
            with recording(tmp_path) as rig:
                yield rig.telemetry


def phases_recorded(telemetry: Telemetry) -> int:
    """Return how many phases lie in the rings."""
    assert telemetry._session
    return sum(
        len(list(RingFile(path, 0).slots(Kind.PHASE))) for path in telemetry._session.path.glob("ring-*")
    )


def in_threads(work: Any) -> None:
    """Run work(0) .. work(3) at once; raise what one of them raises."""
    failures: list[BaseException] = []

    def guard(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001  shown by the test
            failures.append(error)

    threads = [threading.Thread(target=guard, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    if failures:
        raise failures[0]


def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ weight).sum(-1)


def call_in_phases(worker: Worker, compiled: Any, *arguments: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for number in range(CALLS):
        with worker.step() as step:
            with worker.queue_get:
                pass
            with worker.model_forward, worker.phase("inner"):
                results.append(compiled(*arguments))
            step.set(tokens=number, bucket="512", note=0.5)
    return results


def test_phases_around_a_compiled_call_cause_no_graph_break_and_no_recompile(telemetry: Telemetry) -> None:
    """Each of four threads compiles a function of its own."""
    backends = [CompileCounter() for _ in range(THREADS)]
    x, weight = torch.randn(8, 16), torch.randn(16, 4)
    wanted = model(x, weight)

    def work(index: int) -> None:
        def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return model(x, weight)

        compiled = torch.compile(own, backend=backends[index], fullgraph=True)
        results = call_in_phases(telemetry.worker("target", index), compiled, x, weight)
        assert all(torch.equal(result, wanted) for result in results)

    in_threads(work)
    assert [backend.frame_count for backend in backends] == [1] * THREADS
    assert dict(counters["graph_break"]) == {}
    if telemetry.enabled:
        assert phases_recorded(telemetry) == THREADS * CALLS * 3


def test_threads_that_share_a_compiled_function_do_not_recompile_it(telemetry: Telemetry) -> None:
    backend = CompileCounter()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x, weight = torch.randn(8, 16), torch.randn(16, 4)
    wanted = compiled(x, weight)

    def work(index: int) -> None:
        results = call_in_phases(telemetry.worker("target", index), compiled, x, weight)
        assert all(torch.equal(result, wanted) for result in results)

    in_threads(work)
    assert backend.frame_count == 1
    assert dict(counters["graph_break"]) == {}


def test_a_training_step_with_a_compiled_module_is_compiled_once(telemetry: Telemetry) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    worker = telemetry.worker("drafter", 0)
    x = torch.randn(4, 16)
    for _ in range(CALLS):
        with worker.step():
            with worker.forward:
                loss = compiled(x).square().mean()
            with worker.backward:
                loss.backward()
            with worker.optimizer:
                optimizer.step()
                optimizer.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1
    assert dict(counters["graph_break"]) == {}
    if telemetry.enabled:
        assert phases_recorded(telemetry) == 3 * CALLS


def test_a_phase_inside_a_compiled_function_gives_the_same_result(telemetry: Telemetry) -> None:
    backend = CompileCounter()
    worker = telemetry.worker("target", 0)
    phase = worker.forward

    @torch.compile(backend=backend, fullgraph=True)
    def called(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    @torch.compile(backend=backend)
    def outer(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        with phase:
            y = called(y)
        return y + 1

    x = torch.randn(8)
    wanted = x.cos().sin() * 2 + 1
    attempts = []
    for _ in range(CALLS):
        with worker.step():
            assert torch.equal(outer(x), wanted)
        attempts.append(counters["frames"]["total"])
    assert len(set(attempts)) == 1, "it was compiled again"
    assert backend.frame_count == 1
    if telemetry.enabled:
        assert backend.op_count == 2  # `called` alone
        assert phases_recorded(telemetry) == CALLS
    else:
        assert backend.op_count == 4  # all of it, in one graph
    assert dict(counters["graph_break"]) == {}  # where dynamo gives up on a function it counts none


def test_all_of_telemetry_inside_a_compiled_function_gives_the_same_result(telemetry: Telemetry) -> None:
    """Also where the phase is made in there. Dynamo warns of what it cannot trace, and compiles once more
    where it can."""
    worker = telemetry.worker("target", 0)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        with worker.step() as step:
            with worker.forward:
                y = x.sin()
            step.set(tokens=8)
            with worker.phase("inner", "lock_wait"):
                y = y + step.produced() * 0
        return y + 1

    x = torch.randn(8)
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=False):
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert torch.equal(step(x), x.sin() + 1)
    if telemetry.enabled:
        assert phases_recorded(telemetry) == 6


# --- random streams and weights

TRAINER = """
import hashlib, queue, random, sys
import numpy, torch
import otel_dflash

random.seed(1); numpy.random.seed(2); torch.manual_seed(3)
torch.set_deterministic_debug_mode("error")
torch.set_num_threads(1)
telemetry = otel_dflash.start()
target, drafter = telemetry.worker("target", 0, gpu=0), telemetry.worker("drafter", 0)
items = telemetry.wrap_queue(queue.Queue(), "hidden_states", capacity=4)
module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(16, 1))
for number in range(40):
    with target.step() as step:
        step.set(tokens=number, bucket="8", note=random.random(), batch_id=f"b{number}")
        with target.model_forward:
            x = torch.randn(4, 8) + torch.from_numpy(numpy.random.rand(4, 8)).float() * random.gauss(0, 1)
        with target.queue_put:
            items.put(x)
    with drafter.step():
        with drafter.queue_get:
            x = items.get()
        with drafter.forward:
            loss = module(x).square().mean()
        with drafter.backward:
            loss.backward()
        with drafter.optimizer:
            with torch.no_grad():  # torch.optim would import the compiler
                for weight in module.parameters():
                    weight -= 0.05 * weight.grad
                    weight.grad = None

def digest(value):
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()

print("weights", digest(b"".join(weight.detach().numpy().tobytes() for weight in module.parameters())))
print("random", digest(random.getstate()))
print("numpy", digest([part.tobytes() if hasattr(part, "tobytes") else part for part in numpy.random.get_state()]))
print("torch", digest(torch.get_rng_state().numpy().tobytes()))
print("draws", random.random(), numpy.random.rand(), torch.rand(1).item())
print(telemetry.enabled, file=sys.stderr)
"""


def test_random_streams_and_trained_weights_are_the_same_with_and_without_telemetry(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "OTEL_DFLASH_DIR": str(tmp_path)}
    trainer = [sys.executable, "-c", TRAINER]
    commands = {
        "true": trainer,
        "false": [sys.executable, "-m", "otel_dflash", "run", "--quiet", "--", *trainer],
    }
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "OTEL_DFLASH_DISABLED": disabled},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for disabled, command in commands.items()
    ]
    answers = [process.communicate(timeout=100) for process in processes]
    assert [stderr for _, stderr in answers] == ["False\n", "True\n"]  # is telemetry on?
    outputs = [stdout.splitlines() for stdout, _ in answers]
    assert outputs[0] == outputs[1]
    assert [line.split()[0] for line in outputs[0]] == ["weights", "random", "numpy", "torch", "draws"]
