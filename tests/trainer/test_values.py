"""Values and contexts of a step: they arrive exactly, or they are refused unread and counted."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import otel_dflash
from otel_dflash.records import NameKind
from otel_dflash.trainer.values import CONTEXT_MAX
from tests.trainer.ring_reader import MemoryWorker

STEP = ("STEP", "", "")


@pytest.fixture
def memory() -> MemoryWorker:
    return MemoryWorker(slots=1024)


class Untouchable:
    """Nothing of a value that is refused is looked at."""

    def _raise(self, *_: object, **__: object) -> Any:
        raise AssertionError("read")

    __bool__ = __int__ = __float__ = __index__ = __str__ = __repr__ = __hash__ = __len__ = __iter__ = (
        __format__
    ) = _raise
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __getattribute__ = __add__ = __class_getitem__ = (
        _raise
    )


def test_values_arrive_exactly(memory: MemoryWorker) -> None:
    with memory.worker.step() as step:
        step.set(tokens=(1 << 63) - 1, loss_tokens=0, bucket="long", step=(1 << 48) - 2, batch_id="é\ud800")
        step.set(
            big=(1 << 63) - 1,
            small=1 - (1 << 63),
            yes=True,
            no=False,
            rate=0.1,
            nan=float("nan"),
            infinite=float("-inf"),
        )
    *attributes, recorded = memory.take()
    names = memory.reader.names()

    def value(kind: int, word: int) -> Any:
        if kind == 2:
            return names[word][1]
        packed = struct.pack("<Q", word)
        return bool(word) if kind == 3 else struct.unpack("<d" if kind == 1 else "<q", packed)[0]

    values = {record.name: value(record.words[2], record.words[4]) for record in attributes}
    assert repr(values) == repr(
        {
            "batch_id": "é?",
            "big": 9223372036854775807,
            "small": -9223372036854775807,
            "yes": True,
            "no": False,
        }
        | {"rate": 0.1, "nan": float("nan"), "infinite": float("-inf")}
    )
    tokens, loss_tokens, labels, root = recorded.words[4:]
    assert (tokens, loss_tokens, labels >> 16, names[labels & 0xFFFF], root) == (
        (1 << 63) - 1,
        0,
        (1 << 48) - 1,
        (7, "long"),
        0,
    )


def test_unset_values_are_told_from_zero(memory: MemoryWorker) -> None:
    with memory.worker.step():
        pass
    assert memory.take()[0].words[4:] == (1 << 63, 1 << 63, 0, 0)


def test_other_values_are_refused_without_being_read_and_said_once(
    memory: MemoryWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: object) -> Any:
        raise AssertionError("read")

    for name in (
        "item",
        "tolist",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__eq__",
        "__format__",
        "__repr__",
    ):
        monkeypatch.setattr(torch.Tensor, name, read)
    tensor = torch.tensor(3)
    with memory.worker.step() as step:
        step.set(tokens=1, loss_tokens=2, bucket=3, step=4)
        step.set(tokens=tensor, loss_tokens=tensor, bucket=tensor, step=tensor, loss=tensor)
        step.set(tokens=np.bool_(True), loss_tokens=np.float64(1.0), name=np.str_("a"), bucket=True)
        step.set(moment=np.datetime64(1, "s"), angle=np.complex128(1), cell=np.array(1), step=np.int8(-1))
        step.set(tokens=Untouchable(), other=Untouchable(), nothing=None, parts=[1])
        step.set(
            tokens=-1, loss_tokens=1 << 63, step=(1 << 48) - 1, bucket=10**5000, large=1 << 63, low=-(1 << 63)
        )
        step.set(loss=tensor, rate=Fraction(1, 2))
        step.consumed(tensor)  # type: ignore[arg-type]
    (recorded,) = memory.take()
    names = memory.reader.names()
    assert (*recorded.words[4:6], recorded.words[6] >> 16, names[recorded.words[6] & 0xFFFF]) == (
        1,
        2,
        5,
        (7, "3"),
    )
    assert memory.counters() == {"steps": 1, "tokens": 1, "value": 26}
    here = f"{__name__}.Untouchable"
    assert [text for kind, text in names if kind == 6] == [
        *(f"{key} torch.Tensor" for key in ("tokens", "loss_tokens", "step", "bucket", "loss")),
        *(
            f"tokens {np.bool_.__module__}.{np.bool_.__qualname__}",
            "loss_tokens numpy.float64",
            "bucket bool",
            "name numpy.str_",
            "step numpy.int8",
            "moment numpy.datetime64",
            "angle numpy.complex128",
            "cell numpy.ndarray",
        ),
        *(f"tokens {here}", f"other {here}", "nothing NoneType", "parts list"),
        *("tokens int", "loss_tokens int", "step int", "bucket int", "large int", "low int"),
        "rate fractions.Fraction",
        "context torch.Tensor",
    ]


def test_numpy_scalars_arrive_as_pythons_own_numbers(memory: MemoryWorker) -> None:
    with memory.worker.step() as step:
        step.set(tokens=np.int64(7), loss_tokens=np.uint8(3), bucket=np.int32(512), step=np.uint64(9))
        step.set(
            rate=np.float64(0.5),
            half=np.float16(0.25),
            single=np.float32(2),
            long=np.longdouble(4),
            no=np.bool_(False),
        )
        step.set(
            **{kind.__name__: kind(5) for kind in (np.int8, np.uint16, np.uint32, np.int16, np.longlong)}
        )
        step.set(largest=np.uint64((1 << 63) - 1), beyond=np.uint64(1 << 63))
    *attributes, recorded = memory.take()
    names = memory.reader.names()
    assert [recorded.words[4], recorded.words[5], recorded.words[6] >> 16] == [7, 3, 10]
    assert names[recorded.words[6] & 0xFFFF] == (7, "512")
    doubles = {
        name: struct.unpack("<Q", struct.pack("<d", value))[0]
        for name, value in (("rate", 0.5), ("half", 0.25), ("single", 2.0), ("long", 4.0))
    }
    assert {record.name: (record.words[2], record.words[4]) for record in attributes} == {
        **{name: (1, word) for name, word in doubles.items()},
        "no": (3, 0),
        **{kind.__name__: (0, 5) for kind in (np.int8, np.uint16, np.uint32, np.int16, np.longlong)},
        "largest": (0, (1 << 63) - 1),
    }
    assert memory.counters() == {"steps": 1, "tokens": 7, "value": 1}
    assert [text for kind, text in names if kind == 6] == ["beyond int"]


class LazyModule(ModuleType):
    """What looks at it imports the module it stands for."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("imported")


@pytest.mark.parametrize("make", [lambda: None, lambda: LazyModule("numpy"), lambda: ModuleType("numpy")])
def test_numpy_that_is_not_loaded_is_not_asked(
    memory: MemoryWorker, monkeypatch: pytest.MonkeyPatch, make: Callable[[], ModuleType | None]
) -> None:
    """It is not there, it is imported at the first look at it, or another thread is about to import it."""
    half = np.float64(0.5)
    loaded = make()
    with monkeypatch.context() as patch:
        if loaded is None:
            patch.delitem(sys.modules, "numpy")
        else:
            patch.setitem(sys.modules, "numpy", loaded)
        with memory.worker.step() as step:
            step.set(rate=half)
        is_there = "numpy" in sys.modules
    assert memory.counters() == {"steps": 1, "value": 1}
    assert is_there == (loaded is not None)


def test_a_class_whose_metaclass_compares_and_hashes_is_refused_unasked(memory: MemoryWorker) -> None:
    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            raise AssertionError("compared")

        def __hash__(cls) -> int:
            raise AssertionError("hashed")

    class Value(metaclass=Meta):
        pass

    value: Any = Value()
    with memory.worker.step() as step:
        step.set(tokens=value, bucket=value, step=value, other=value)
        step.consumed(value)
    assert memory.counters() == {"steps": 1, "value": 5}


def test_strings_beyond_the_table_read_other_and_name_their_key() -> None:
    memory = MemoryWorker(slots=4096)
    with memory.worker.step() as step:
        for n in range(520):
            step.set(batch_id=f"shard-{n}", count=n)
        step.set(bucket="long", name="x", again="shard-1")
    *attributes, recorded = memory.take()
    names = memory.reader.names()
    texts = [names[record.words[4]][1] for record in attributes if record.words[2] == 2]
    kept = texts.index("_OTHER")
    assert texts == [*(f"shard-{n}" for n in range(kept)), *["_OTHER"] * (521 - kept), "shard-1"]
    assert 490 < kept < 512
    assert names[recorded.words[6] & 0xFFFF][1] == "_OTHER"
    assert [text for kind, text in names if kind == 8] == ["batch_id", "bucket", "name"]
    assert memory.counters() == {"steps": 1, "name": 522 - kept}


def test_a_new_thread_for_each_step_costs_thread_names_alone() -> None:
    memory = MemoryWorker(slots=8192)
    names = ["queue_get", "forward", "optimizer", "queue_put"]  # the last is used first after 825 threads

    def turn(name: str) -> None:
        with memory.worker.step() as step, memory.worker.phase(name):
            step.set(bucket=f"bucket_{name}", **{f"key_{name}": 1})

    for number in range(1100):
        thread = threading.Thread(target=turn, args=(names[number // 275],))
        thread.start()
        thread.join()
    table = memory.reader.names()
    records = memory.take()
    buckets = [table[record.words[6] & 0xFFFF][1] for record in records if record.kind == "STEP"]
    found = [record.name for record in records if record.kind in ("PHASE", "ATTRIBUTE")]
    phases = ["starved queue_get", "busy forward", "busy optimizer", "backpressured queue_put"]
    keys = [f"key_{name}" for name in names]
    assert found == [text for pair in zip(keys, phases, strict=True) for _ in range(275) for text in pair]
    assert buckets == [f"bucket_{name}" for name in names for _ in range(275)]
    assert [text for kind, text in table if kind == NameKind.FILLED] == ["thread"]
    kept = sum(kind == NameKind.THREAD for kind, _ in table)
    assert 100 < kept <= 128
    assert memory.counters() == {"steps": 1100, "name": 1100 - kept}


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
    assert [context >> 64 for context in (*contexts, passed_on)] == [source << 64 | source] * 2 + [
        source << 64 | middle
    ]
    one, two, step_of_two = second.take()
    assert [
        (record.kind, record.name, record.words[0] & 0xFFFF, record.words[4:]) for record in (one, two)
    ] == [
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


@pytest.mark.parametrize("context", [CONTEXT_MAX >> 64 << 64, 1, 1 << 64, 1 << 128])
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
