"""The whole public API while recording, while disabled, and where no session can be had: the same in kind."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import otel_dflash
from otel_dflash.session import create_session

Outcome = tuple[str, ...]


def kind(value: Any) -> str:
    """Return what a user can tell of a value besides its number: its type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def outcome(call: Callable[[], Any]) -> Outcome:
    """Return the kind of what a call returns, or what it raises and says."""
    try:
        return ("returns", kind(call()))
    except Exception as error:  # noqa: BLE001  it is what is compared
        text = "" if isinstance(error, TypeError) else str(error)  # it counts `self`
        return ("raises", kind(error), re.sub("0x[0-9a-f]+", "0x", text))


def raise_value_error(*_: object) -> None:
    raise ValueError("x")


def whole_api(telemetry: otel_dflash.Telemetry) -> dict[str, Outcome]:
    """Call everything that is public, rightly and wrongly; return each outcome by what was called."""
    worker = telemetry.worker("target", 0, gpu=1)
    phase = worker.forward
    step = worker.step
    items: queue.Queue[Any] = queue.Queue()
    wrapped = telemetry.wrap_queue(items, "items", capacity=4, min_ready=1)
    calls: dict[str, Callable[[], Any]] = {}
    outcomes: dict[str, Outcome] = {}

    def run(prefix: str) -> None:
        outcomes.update({f"{prefix}{name}": outcome(call) for name, call in calls.items()})
        calls.clear()

    def inside(context: Any, action: Callable[..., Any]) -> Any:
        with context as entered:
            action()
        return entered

    calls["start again"] = otel_dflash.start
    calls["start with a wrong id"] = lambda: otel_dflash.start("a b")
    calls["enabled"] = lambda: telemetry.enabled
    calls["run_id"] = lambda: telemetry.run_id
    calls["worker"] = lambda: telemetry.worker("drafter", 0)
    calls["worker with a wrong role"] = lambda: telemetry.worker("a b", 0)
    calls["worker with a wrong index"] = lambda: telemetry.worker("target", -1)
    calls["worker with a wrong gpu"] = lambda: telemetry.worker("target", 0, gpu="cuda")  # type: ignore[arg-type]
    calls["wrap_queue"] = lambda: telemetry.wrap_queue(queue.LifoQueue(), "more")
    calls["wrap_queue with a wrong capacity"] = lambda: telemetry.wrap_queue(queue.Queue(), "q", capacity=-1)
    calls["wrap_queue with a wrong name"] = lambda: telemetry.wrap_queue(queue.Queue(), "")
    calls["wrap_queue of a wrong queue, wrapped"] = lambda: telemetry.wrap_queue(wrapped, "items")
    calls["wrap_queue of a wrong queue, a class"] = lambda: telemetry.wrap_queue(queue.Queue, "q")
    calls["wrap_queue of a wrong queue, without methods"] = lambda: telemetry.wrap_queue([], "q")
    calls["wrap_queue by a wrong method"] = lambda: telemetry.wrap_queue(queue.Queue(), "q", put=5)  # type: ignore[arg-type]
    calls["wrap_queue by method names"] = lambda: telemetry.wrap_queue(
        multiprocessing.Queue(), "q", put="put_nowait", get="get_nowait"
    )
    calls["role, index, gpu"] = lambda: (worker.role, worker.index, worker.gpu)
    calls["phase"] = lambda: worker.phase("clip", state="lock_wait")
    calls["phase of no state"] = lambda: worker.phase("forward", state="idle")
    calls["phase of another state"] = lambda: worker.phase("forward", state="starved")
    calls["phase of a wrong name"] = lambda: worker.phase("a b")
    calls["no phase"] = lambda: worker.encode
    calls["no method"] = lambda: step.finish()  # type: ignore[attr-defined]
    run("")

    for name, context in (("phase", phase), ("phase()", phase()), ("step", step), ("step()", step())):
        calls[f"with {name}"] = lambda context=context: inside(context, lambda: None)
        calls[f"with {name} that fails"] = lambda context=context: inside(context, raise_value_error)
    calls["with resume"] = lambda: inside(worker.resume(5), lambda: None)
    calls["with resume of a tensor"] = lambda: inside(worker.resume(torch.tensor(5)), lambda: None)  # type: ignore[arg-type]
    calls["nested"] = lambda: inside(step, lambda: inside(phase, lambda: inside(phase, lambda: None)))
    calls["a step in a step"] = lambda: inside(step, lambda: inside(step, lambda: None))
    for name, span in (("phase", phase), ("step", step)):
        calls[f"@{name}"] = lambda span=span: span(len)("ab")
        calls[f"@{name} that fails"] = lambda span=span: span(raise_value_error)()
        calls[f"@{name} of no function"] = lambda span=span: span(7)
        calls[f"{name}.begin"] = span.begin
        calls[f"{name}.begin again"] = span.begin
        calls[f"{name}.end with an error"] = lambda span=span: span.end(ValueError())
        calls[f"{name}.end"] = lambda span=span: span.end(error=None)
        calls[f"{name}.end again"] = span.end
    run("")

    values: dict[str, Any] = {
        "nothing": {},
        "usual": {
            "tokens": 1,
            "loss_tokens": 1,
            "bucket": 512,
            "step": 1,
            "batch_id": "a",
            "rate": 0.5,
            "on": True,
        },
        "numpy": {"tokens": np.int64(1), "bucket": np.int32(2), "rate": np.float32(1), "on": np.bool_(True)},
        "tensors": dict.fromkeys(("tokens", "loss_tokens", "bucket", "step", "loss"), torch.tensor(1)),
        "a key named self": {"self": 1},
        "out of range": {"tokens": -1, "step": 1 << 60, "large": 1 << 70},
        "other types": {"tokens": "5", "bucket": None, "parts": [1], "what": object()},
    }
    for where in ("outside", "inside", "cancelled"):
        for name, given in values.items():
            calls[f"set {name}"] = lambda given=given: step.set(**given)
        calls["set by position"] = lambda: step.set(5)  # type: ignore[call-arg]
        calls["id"] = lambda: step.id
        calls["produced"] = step.produced
        calls["consumed"] = lambda: step.consumed(step.produced())
        calls["consumed a tensor"] = lambda: step.consumed(torch.tensor(1))  # type: ignore[arg-type]
        calls["put"] = lambda: wrapped.put("item")
        calls["get"] = wrapped.get
        calls["get of an empty queue"] = wrapped.get_nowait
        calls["cancel"] = step.cancel
        if where != "outside":
            step.begin()
        if where == "cancelled":
            step.cancel()
        run(f"{where}: ")
        step.end()

    def elsewhere() -> None:
        calls["set"] = lambda: step.set(tokens=1)
        calls["phase"] = lambda: inside(phase, lambda: None)
        calls["step"] = lambda: inside(step, lambda: None)
        calls["cancel"] = step.cancel
        run("another thread: ")

    with step:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    for name, part in (("telemetry", telemetry), ("worker", worker), ("phase", phase), ("step", step)):
        for how, copied in (
            ("copy", copy.copy),
            ("deepcopy", copy.deepcopy),
            ("pickle", lambda value: pickle.loads(pickle.dumps(value))),
        ):
            calls[f"{how} of {name}"] = lambda part=part, copied=copied: copied(part)
            calls[f"{how} of {name} is the same"] = lambda part=part, copied=copied: {True: 1}[
                copied(part) is part
            ]
    calls["worker.close"] = worker.close
    calls["worker.close again"] = worker.close
    calls["a step after close"] = lambda: inside(step, lambda: inside(phase, lambda: step.set(tokens=1)))
    calls["close"] = telemetry.close
    calls["close again"] = telemetry.close
    run("")
    return outcomes


def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_DFLASH_SESSION", str(create_session("run-1").path))


def disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_DFLASH_DISABLED", "true")


def without_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_DFLASH_SESSION", "/nowhere/session")


def test_everything_behaves_the_same_whether_on_off_or_not_to_be_had(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = {}
    for way in (recording, disabled, without_a_session):
        with monkeypatch.context() as patch:
            patch.setattr(otel_dflash.trainer.telemetry, "_own", otel_dflash.Telemetry())
            way(patch)
            telemetry = otel_dflash.start()
            assert telemetry.enabled == (way is recording)
            outcomes[way] = whole_api(telemetry)
    assert len(outcomes[recording]) > 100
    assert outcomes[disabled] == outcomes[recording]
    assert outcomes[without_a_session] == outcomes[recording]
    wrong = {name: what for name, (*what, _) in outcomes[recording].items() if "wrong" in name}
    assert len(wrong) == 11
    assert {*map(tuple, wrong.values())} == {("raises", "otel_dflash.config.ConfigError")}
    raised = {name for name, (what, *_) in outcomes[recording].items() if what == "raises"}
    assert {name for name in raised if "wrong" not in name and "fails" not in name} == {
        *("phase of no state", "phase of another state", "no phase", "no method"),
        *("@phase of no function", "@step of no function"),
        *(
            f"{where}: {name}"
            for where in ("outside", "inside", "cancelled")
            for name in ("set by position", "get of an empty queue")
        ),
    }
