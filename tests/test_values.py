"""Values and contexts of a step: they arrive exactly, or they are refused unread and counted."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

import otel_dflash
from otel_dflash.trainer.values import CONTEXT_MAX
from tests.ring_reader import MemoryWorker

STEP = ("STEP", "", "")


@pytest.fixture
def memory() -> MemoryWorker:
    return MemoryWorker(slots=1024)


class Untouchable:
    """Nothing of a value that is refused is looked at."""

    def _raise(self, *_: object, **__: object) -> Any:
        raise AssertionError("read")

    __bool__ = __int__ = __float__ = __index__ = __str__ = __repr__ = __hash__ = __len__ = __iter__ = __format__ = _raise
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __getattribute__ = __add__ = __class_getitem__ = _raise


def test_values_arrive_exactly(memory: MemoryWorker) -> None:
    with memory.worker.step() as step:
        step.set(tokens=(1 << 63) - 1, loss_tokens=0, bucket="long", step=(1 << 48) - 2, batch_id="é\ud800")
        step.set(big=(1 << 63) - 1, small=1 - (1 << 63), yes=True, no=False, rate=0.1, nan=float("nan"), infinite=float("-inf"))
    *attributes, recorded = memory.take()
    names = memory.reader.names()

    def value(kind: int, word: int) -> Any:
        if kind == 2:
            return names[word][1]
        packed = struct.pack("<Q", word)
        return bool(word) if kind == 3 else struct.unpack("<d" if kind == 1 else "<q", packed)[0]

    values = {record.name: value(record.words[2], record.words[4]) for record in attributes}
    assert repr(values) == repr(
        {"batch_id": "é?", "big": 9223372036854775807, "small": -9223372036854775807, "yes": True, "no": False}
        | {"rate": 0.1, "nan": float("nan"), "infinite": float("-inf")}
    )
    tokens, loss_tokens, labels, root = recorded.words[4:]
    assert (tokens, loss_tokens, labels >> 16, names[labels & 0xFFFF], root) == ((1 << 63) - 1, 0, (1 << 48) - 1, (7, "long"), 0)


def test_unset_values_are_told_from_zero(memory: MemoryWorker) -> None:
    with memory.worker.step():
        pass
    assert memory.take()[0].words[4:] == (1 << 63, 1 << 63, 0, 0)


def test_other_values_are_refused_without_being_read_and_said_once(memory: MemoryWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object) -> Any:
        raise AssertionError("read")

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__eq__", "__format__", "__repr__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    tensor = torch.tensor(3)
    with memory.worker.step() as step:
        step.set(tokens=1, loss_tokens=2, bucket=3, step=4)
        step.set(tokens=tensor, loss_tokens=tensor, bucket=tensor, step=tensor, loss=tensor)
        step.set(tokens=np.int64(3), rate=np.float64(0.5), name=np.str_("a"), flag=np.bool_(True), bucket=True)
        step.set(tokens=Untouchable(), other=Untouchable(), nothing=None, parts=[1])
        step.set(tokens=-1, loss_tokens=1 << 63, step=(1 << 48) - 1, bucket=10**5000, large=1 << 63, low=-(1 << 63))
        step.set(loss=tensor, rate=np.float64(0.5))
        step.consumed(tensor)  # type: ignore[arg-type]
    (recorded,) = memory.take()
    names = memory.reader.names()
    assert (*recorded.words[4:6], recorded.words[6] >> 16, names[recorded.words[6] & 0xFFFF]) == (1, 2, 5, (7, "3"))
    assert memory.counters() == {"steps": 1, "tokens": 1, "value": 23}
    here = f"{__name__}.Untouchable"
    assert [text for kind, text in names if kind == 6] == [
        *(f"{key} torch.Tensor" for key in ("tokens", "loss_tokens", "step", "bucket", "loss")),
        *(
            "tokens numpy.int64",
            "bucket bool",
            "rate numpy.float64",
            "name numpy.str_",
            f"flag {np.bool_.__module__}.{np.bool_.__qualname__}",
        ),
        *(f"tokens {here}", f"other {here}", "nothing NoneType", "parts list"),
        *("tokens int", "loss_tokens int", "step int", "bucket int", "large int", "low int"),
        "context torch.Tensor",
    ]


def test_values_go_by_keyword_whether_on_or_off(memory: MemoryWorker) -> None:
    for worker in (memory.worker, otel_dflash.Telemetry().worker("target", 0)):
        with pytest.raises(TypeError), worker.step() as step:
            step.set(5)  # type: ignore[call-arg]


def test_a_value_set_outside_the_step_is_ignored(memory: MemoryWorker) -> None:
    step = memory.worker.step()
    step.set(tokens=5, other=object())
    with step:
        pass
    step.set(tokens=5)
    assert memory.shapes() == [(*STEP, 1)]
    assert (memory.counters(), step.id) == ({"steps": 1}, 0)


def test_contexts_go_from_step_to_step() -> None:
    first, second, third = MemoryWorker(index=0), MemoryWorker(index=1), MemoryWorker(index=2)
    with first.worker.step() as step:
        contexts = [step.produced(), step.produced()]
        source = step.id
    with second.worker.step() as step:
        for context in contexts:
            step.consumed(context)
        passed_on = step.produced()
        middle = step.id
    with third.worker.step() as step:
        step.consumed(passed_on)
    assert source == first.ring.id + 1
    put_times = [context & (1 << 64) - 1 for context in (*contexts, passed_on)]
    assert put_times == sorted(put_times)
    assert [context >> 64 for context in (*contexts, passed_on)] == [source << 64 | source] * 2 + [source << 64 | middle]
    one, two, step_of_two = second.take()
    assert [(record.kind, record.name, record.words[0] & 0xFFFF, record.words[4:]) for record in (one, two)] == [
        ("CONSUMED", "", 1, (source, source, 0, 0)),
        ("CONSUMED", "", 0, (source, source, 0, 0)),
    ]
    assert [record.words[2] for record in (one, two)] == put_times[:2]
    assert step_of_two.words[7] == source
    assert [record.words[7] for record in third.take() if record.kind == "STEP"] == [source]
    assert [record.words[7] for record in first.take()] == [0]  # its own root
    assert [memory.counters() for memory in (first, second, third)] == [
        {"steps": 1, "puts": 2},
        {"steps": 1, "puts": 1, "gets": 2},
        {"steps": 1, "gets": 1},
    ]


@pytest.mark.parametrize("context", [None, "7", -1, 1 << 192, 1.0, True, b"x"])
def test_what_is_no_context_is_refused(memory: MemoryWorker, context: Any) -> None:
    with memory.worker.step() as step:
        step.consumed(context)
    with memory.worker.resume(context):
        pass
    assert memory.shapes() == [(*STEP, 1), (*STEP, 2)]
    assert memory.counters() == {"steps": 2, "value": 2}


@pytest.mark.parametrize("context", [CONTEXT_MAX, 1, 1 << 64, 1 << 128])
def test_any_int_of_24_bytes_is_taken(memory: MemoryWorker, context: int) -> None:
    with memory.worker.step() as step:
        step.consumed(context)
        step.consumed(0)
    with memory.worker.resume(context) as step:
        step.produced()
    assert memory.counters() == {"steps": 2, "gets": 1, "puts": 1}


def test_a_resumed_step_goes_on_with_anothers_item() -> None:
    first, second = MemoryWorker(index=0), MemoryWorker(index=1)
    with first.worker.step() as step:
        context = step.produced()
        source = step.id
    with second.worker.resume(context) as step, second.worker.d2h:
        handed_on = step.produced()
    with second.worker.step():
        pass
    assert second.shapes() == [("RESUMED", "", "", 1), ("PHASE", "busy d2h", "", 1), (*STEP, 1), (*STEP, 2)]
    assert handed_on >> 64 == source << 64 | source
