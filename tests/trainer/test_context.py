"""A context in each form that people have a place for: it arrives the same, on and off."""

from __future__ import annotations

import copy
import email
import json
import pickle
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint

import otel_dflash
from otel_dflash import Context, Worker
from otel_dflash.records import NameKind
from otel_dflash.session import DETAIL_OFF
from otel_dflash.trainer.context import NULL
from tests.trainer.ring_reader import MemoryWorker
from tests.trainer.test_values import Untouchable

ROOT, PRODUCER, PUT_NS = (9 << 60) + 7, 5 << 28, 1_700_000_000_000_000_000
CONTEXT = Context(ROOT << 128 | PRODUCER << 64 | PUT_NS)
WORDS = (ROOT - (1 << 64), PRODUCER, PUT_NS)
TEXT = "9000000000000007000000005000000017979cfe362a0000"


def through_protobuf(words: tuple[int, ...]) -> list[int]:
    points = [NumberDataPoint.FromString(NumberDataPoint(as_int=word).SerializeToString()) for word in words]
    return [point.as_int for point in points]


FORMS: dict[str, Callable[[Context], Any]] = {
    "context": lambda context: context,
    "int": int,
    "JSON int": lambda context: json.loads(json.dumps(context)),
    "pickle": lambda context: pickle.loads(pickle.dumps(context)),
    "deepcopy": copy.deepcopy,
    "words": lambda context: context.words,
    "tensor": lambda context: torch.tensor(context.words, dtype=torch.int64).tolist(),
    "struct": lambda context: struct.unpack("<3q", struct.pack("<3q", *context.words)),
    "protobuf int64": lambda context: through_protobuf(context.words),
    "JSON list": lambda context: json.loads(json.dumps(context.words)),
    "text": lambda context: context.text,
    "upper case": lambda context: context.text.upper(),
    "header": lambda context: email.message_from_string(f"X-Context: {context.text}\r\n\r\n")["x-context"],
    "bytes": lambda context: context.to_bytes(24, "big"),
}


@pytest.fixture(params=FORMS.values(), ids=list(FORMS))
def form(request: pytest.FixtureRequest) -> Callable[[Context], Any]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def memory() -> MemoryWorker:
    return MemoryWorker(wall_offset_ns=PUT_NS - time.monotonic_ns())


def test_a_context_is_an_int_with_words_and_text() -> None:
    assert (int(CONTEXT) == CONTEXT, CONTEXT.words, CONTEXT.text) == (True, WORDS, TEXT)
    assert (repr(CONTEXT), hash(CONTEXT)) == (repr(int(CONTEXT)), hash(int(CONTEXT)))
    assert not hasattr(CONTEXT, "__dict__")


def test_a_copy_is_the_context_and_a_pickle_the_plain_int() -> None:
    assert copy.copy(CONTEXT) is copy.deepcopy([CONTEXT])[0] is CONTEXT
    read = pickle.loads(pickle.dumps(CONTEXT))
    assert (type(read), read) == (int, int(CONTEXT))
    assert b"otel_dflash" not in pickle.dumps(CONTEXT)


def test_every_form_arrives_the_same(form: Callable[[Context], Any], memory: MemoryWorker) -> None:
    with memory.worker.step() as step:
        step.consumed(form(CONTEXT))
    with memory.worker.resume(form(CONTEXT)):
        pass
    consumed, _, resumed, _ = memory.take()
    assert (consumed.kind, consumed.words[2], consumed.words[4:6]) == ("CONSUMED", PUT_NS, (ROOT, PRODUCER))
    assert (resumed.kind, resumed.words[2], resumed.words[4:6]) == ("RESUMED", PUT_NS, (ROOT, PRODUCER))
    assert memory.counters() == {"steps": 2, "gets": 1}


def test_what_a_step_produced_has_every_form(form: Callable[[Context], Any], memory: MemoryWorker) -> None:
    with memory.worker.step() as step:
        produced = step.produced()
        source = step.id
    with memory.worker.step() as step:
        step.consumed(form(produced))
    consumed = memory.take()[1]
    assert consumed.words[4:6] == (source, source)


def produced_by(worker: Worker) -> Context:
    with worker.step() as step:
        return step.produced()


def produced_with_capture_off(memory: MemoryWorker) -> Context:
    memory.control[0] = DETAIL_OFF
    return produced_by(memory.worker)


def produced_by_another_thread(memory: MemoryWorker) -> Context:
    contexts: list[Context] = []
    with memory.worker.step() as step:
        thread = threading.Thread(target=lambda: contexts.append(step.produced()))
        thread.start()
        thread.join()
    return contexts[0]


def produced_by_a_closed_worker(memory: MemoryWorker) -> Context:
    memory.worker.close()
    return produced_by(memory.worker)


UNCAPTURED: dict[str, Callable[[MemoryWorker], Context]] = {
    "telemetry off": lambda _: produced_by(otel_dflash.Telemetry().worker("target", 0)),
    "disabled": lambda _: produced_by(otel_dflash.start().worker("target", 0)),
    "no ring": lambda _: produced_by(Worker("target", 0, None, lambda step: None)),
    "capture off": produced_with_capture_off,
    "outside a step": lambda memory: memory.worker.step().produced(),
    "another thread": produced_by_another_thread,
    "closed": produced_by_a_closed_worker,
}


@pytest.mark.parametrize(
    "produce",
    [lambda memory: produced_by(memory.worker), *UNCAPTURED.values()],
    ids=["captured", *UNCAPTURED],
)
def test_what_is_too_small_for_a_context_fails_whether_it_is_captured_or_not(
    produce: Callable[[MemoryWorker], Context],
    memory: MemoryWorker,
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_DFLASH_DISABLED", "true")
    context = produce(memory)
    assert type(context) is Context
    for send in (
        lambda: struct.pack("q", context),
        lambda: torch.tensor([context], dtype=torch.int64),
        lambda: NumberDataPoint(as_int=context),
        lambda: context.to_bytes(16, "big"),
    ):
        with pytest.raises((struct.error, RuntimeError, ValueError, OverflowError)):
            send()
    for form in FORMS.values():
        form(context)


@pytest.mark.parametrize("produce", UNCAPTURED.values(), ids=list(UNCAPTURED))
def test_a_step_that_is_not_captured_produces_the_null_context(
    produce: Callable[[MemoryWorker], Context],
    memory: MemoryWorker,
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_DFLASH_DISABLED", "true")
    assert produce(memory) is NULL
    assert (NULL.words, NULL.text) == ((-1, 0, 0), "f" * 16 + "0" * 32)


@pytest.mark.parametrize("null", [NULL, Context(0)])
def test_the_null_context_is_ignored_in_every_form(
    null: Context, form: Callable[[Context], Any], memory: MemoryWorker
) -> None:
    with memory.worker.step() as step:
        step.consumed(form(null))
    with memory.worker.resume(form(null)):
        pass
    assert [record.kind for record in memory.take()] == ["STEP", "STEP"]
    assert memory.counters() == {"steps": 2}


def test_what_is_not_a_context_is_refused_unread_and_counted_where_it_would_be_captured(
    memory: MemoryWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: object) -> Any:
        raise AssertionError("read")

    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__eq__", "__len__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    refused: list[Any] = [
        *((1, 2), [1, 2, 3, 4], (1, 2, True), (1, 2, 3.0), (1, 2, 1 << 63), [TEXT] * 3, range(3)),
        *(TEXT[1:], f"0x{TEXT[2:]}", " " * 48, "g" * 48, "é" * 48, TEXT.encode(), bytes(23), bytearray(24)),
        *(torch.tensor(WORDS), [torch.tensor(1)] * 3, Untouchable(), (Untouchable(), 2, 3)),
    ]
    for worker in (memory.worker, otel_dflash.Telemetry().worker("target", 0)):
        for context in refused:
            with worker.step() as step:
                step.consumed(context)
            with worker.resume(context):
                pass
    assert memory.counters() == {"steps": 2 * len(refused), "value": 2 * len(refused)}


@pytest.mark.parametrize("context", [CONTEXT >> 64 << 64, 5 << 128 | PUT_NS << 64 | ROOT])
def test_a_put_time_that_is_none_is_counted_and_the_item_kept(context: int, memory: MemoryWorker) -> None:
    with memory.worker.step() as step:
        step.consumed(context)
    kinds = [record.kind for record in memory.take()]
    assert (kinds, memory.counters()) == (["CONSUMED", "STEP"], {"steps": 1, "gets": 1, "value": 1})
    assert (NameKind.REFUSED, "put_time int") in memory.reader.names()
