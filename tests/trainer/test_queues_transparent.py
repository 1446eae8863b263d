"""A wrapped queue behaves as the original for every call that telemetry does not know; wrong wraps are said
at once."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import queue
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_dflash import ConfigError, Telemetry, Worker
from tests.agent.rings import Rig, recording
from tests.trainer.queue_kinds import KINDS, BucketStore, Item, QueueKind

STANDARD = [queue.Queue, queue.LifoQueue, queue.PriorityQueue]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with recording(tmp_path) as rig:
        yield rig


@pytest.fixture
def worker(rig: Rig) -> Worker:
    return rig.telemetry.worker("target", 0)


class PlainStore:
    """Can be copied and pickled."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: Any) -> str:
        """Keep the item."""
        self.items.append(item)
        return "kept"

    def get(self) -> Any:
        return self.items.pop(0)


class Slotted:
    """Has no room for a hook, and special methods."""

    __slots__ = ("items", "limit")

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.limit = 3

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, item: Any) -> bool:
        return any(item is own for own in self.items)

    def put(self, item: Any) -> None:
        self.items.append(item)

    def get(self) -> Any:
        return self.items.pop(0)


@pytest.mark.parametrize("make", STANDARD)
def test_a_standard_queue_stays_what_it_is(make: Callable[[int], Any], rig: Rig, worker: Worker) -> None:
    made = make(2)
    before = repr(made)
    wrapped = rig.telemetry.wrap_queue(made, "hidden_states")
    assert wrapped is made
    assert type(wrapped) is make
    assert repr(wrapped) == before
    wrapped.put(1)
    wrapped.put(2)
    assert (wrapped.qsize(), wrapped.full(), wrapped.empty(), wrapped.maxsize, wrapped.unfinished_tasks) == (
        2,
        True,
        False,
        2,
        2,
    )
    with worker.step():
        assert {wrapped.get(), wrapped.get_nowait()} == {1, 2}
    wrapped.task_done()
    wrapped.task_done()
    wrapped.join()
    with pytest.raises(ValueError, match=r"task_done\(\) called too many times"):
        wrapped.task_done()


def test_a_simple_queue_has_a_stand_in_that_looks_the_same(rig: Rig) -> None:
    made: queue.SimpleQueue[int] = queue.SimpleQueue()
    wrapped = rig.telemetry.wrap_queue(made, "hidden_states")
    wrapped.put(1)
    assert isinstance(wrapped, queue.SimpleQueue)
    assert wrapped.__class__ is queue.SimpleQueue
    assert repr(wrapped) == repr(made)
    assert (wrapped.qsize(), wrapped.empty(), made.qsize()) == (1, False, 1)
    assert set(dir(made)) == set(dir(wrapped))
    assert weakref.ref(wrapped)() is wrapped
    with pytest.raises(TypeError) as of_made:
        len(made)  # type: ignore[arg-type]
    with pytest.raises(TypeError) as of_wrapped:
        len(wrapped)  # type: ignore[arg-type]
    assert str(of_wrapped.value).split()[-2:] == str(of_made.value).split()[-2:] == ["no", "len()"]
    with pytest.raises(AttributeError, match=r"'_queue\.SimpleQueue' object has no attribute 'maxsize'"):
        wrapped.maxsize  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        wrapped.maxsize = 3  # type: ignore[attr-defined]


def test_a_stand_in_passes_on_special_methods_and_attributes(rig: Rig) -> None:
    made = Slotted()
    wrapped = rig.telemetry.wrap_queue(made, "hidden_states")
    item = Item()
    wrapped.put(item)
    wrapped.limit = 5
    assert (len(wrapped), bool(wrapped), item in wrapped, made.limit, isinstance(wrapped, Slotted)) == (
        1,
        True,
        True,
        5,
        True,
    )
    assert wrapped.get() is item
    assert not wrapped


@pytest.mark.parametrize("make", [*STANDARD, queue.SimpleQueue])
def test_what_cannot_be_pickled_says_so_as_before(make: Callable[[], Any], rig: Rig) -> None:
    with pytest.raises(TypeError) as before:
        pickle.dumps(make())
    with pytest.raises(TypeError) as after:
        pickle.dumps(rig.telemetry.wrap_queue(make(), "hidden_states"))
    assert str(after.value) == str(before.value)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_a_copy_of_a_wrapped_queue_is_an_unwrapped_queue(copied: Callable[[Any], Any], rig: Rig) -> None:
    wrapped = rig.telemetry.wrap_queue(PlainStore(), "hidden_states")
    wrapped.put("a")
    other = copied(wrapped)
    other.put("b")
    assert (wrapped.items, other.items) == (["a"], ["a", "b"])
    assert rig.telemetry.wrap_queue(other, "hidden_states") is other


def test_a_hooked_method_looks_like_the_original(rig: Rig) -> None:
    wrapped = rig.telemetry.wrap_queue(PlainStore(), "hidden_states")
    assert wrapped.put("a") == "kept"
    assert (wrapped.put.__name__, wrapped.put.__doc__) == ("put", "Keep the item.")
    assert inspect.signature(wrapped.put) == inspect.signature(PlainStore().put)
    assert wrapped.put(item="b") == "kept"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'item'"):
        wrapped.put()  # type: ignore[call-arg]


@pytest.mark.parametrize("make", STANDARD)
def test_a_queue_that_nobody_holds_is_freed_at_once_with_its_items(make: Callable[[], Any], rig: Rig) -> None:
    gc.disable()
    try:
        wrapped = rig.telemetry.wrap_queue(make(), "hidden_states")
        item = Item()
        kept = weakref.ref(item)
        wrapped.put(item)
        del wrapped, item
        assert kept() is None
    finally:
        gc.enable()


def test_a_method_taken_off_a_wrapped_queue_works_on_its_own(kind: QueueKind, rig: Rig) -> None:
    wrapped = kind.wrap(rig.telemetry, kind.make())
    put, get = wrapped.put, getattr(wrapped, kind.get)
    del wrapped
    put(Item())
    put(Item())
    assert get() is not None


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> QueueKind:
    return request.param  # type: ignore[no-any-return]


class Failing(queue.Queue[Any]):
    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        raise ZeroDivisionError("put")

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        raise ZeroDivisionError("get")

    put_nowait = put
    get_nowait = get


class FailingInside(queue.Queue[Any]):
    def _put(self, item: Any) -> None:
        raise ZeroDivisionError("put")

    def _get(self) -> Any:
        raise ZeroDivisionError("get")

    def _qsize(self) -> int:
        return 1


class FailingStore:
    put = Failing.put
    get = Failing.get


@pytest.mark.parametrize("make", [Failing, FailingInside, FailingStore])
def test_what_the_queue_raises_passes_through_untouched(
    make: Callable[[], Any], rig: Rig, worker: Worker
) -> None:
    wrapped = rig.telemetry.wrap_queue(make(), "hidden_states")
    with worker.step():
        with pytest.raises(ZeroDivisionError, match=r"^put$") as put:
            wrapped.put(Item())
        with pytest.raises(ZeroDivisionError, match=r"^get$") as get:
            wrapped.get()
    assert put.value.__context__ is get.value.__context__ is put.value.__cause__ is None
    assert rig.consumed(worker) == []
    assert rig.counted(worker) == {}


# --- wrapping


def test_telemetry_that_is_off_returns_the_queue_as_it_is(kind: QueueKind) -> None:
    made = kind.make()
    before = dict(vars(made)) if hasattr(made, "__dict__") else None
    assert kind.wrap(Telemetry(), made) is made
    assert before is None or vars(made) == before


@pytest.mark.parametrize("again", ["wrapped", "made"])
@pytest.mark.parametrize("is_on", [True, False])
def test_a_queue_is_wrapped_once(is_on: bool, again: str, kind: QueueKind, rig: Rig) -> None:
    telemetry = rig.telemetry if is_on else Telemetry()
    made = kind.make()
    wrapped = kind.wrap(telemetry, made)
    with pytest.raises(ConfigError, match=r"is wrapped already; wrap it once, where it is created$"):
        kind.wrap(telemetry, {"wrapped": wrapped, "made": made}[again])


class Frozen:
    def put(self, item: Any) -> None: ...

    def get(self) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"cannot assign {name}")


class Anything:
    def __getattr__(self, name: str) -> Any:
        return lambda *args: name


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda t: t.wrap_queue([], "q"), "list has no method 'put'; set put=<its put method>"),
        (
            lambda t: t.wrap_queue(BucketStore(), "q"),
            "BucketStore has no method 'get'; set get=<its get method>",
        ),
        (
            lambda t: t.wrap_queue(asyncio.Queue(), "q"),
            ("Queue.put is a coroutine or a generator; use step.produced() and step.consumed(context) there"),
        ),
        (
            lambda t: t.wrap_queue(Frozen(), "q"),
            (
                "methods of a Frozen cannot be replaced (cannot assign put); use step.produced() and "
                "step.consumed(context) instead"
            ),
        ),
        (
            lambda t: t.wrap_queue(queue.Queue(), "q", put=5),
            "put must be the name of a method, got 5; try put='put'",
        ),
        (
            lambda t: t.wrap_queue([], "q", put="append", get=None),
            "get must be the name of a method, got None; try get='get'",
        ),
        (
            lambda t: t.wrap_queue(queue.Queue, "q"),
            "wrap_queue needs a queue, got the class Queue; create one first",
        ),
        (
            lambda t: t.wrap_queue(queue.Queue(), ""),
            "a queue's name must be a str of 1 to 64 characters, got ''; try 'hidden_states'",
        ),
        (
            lambda t: t.wrap_queue(queue.Queue(), "q", capacity=-1),
            "capacity of queue 'q' must be an int >= 0, got -1; leave it out if there is none",
        ),
        (
            lambda t: t.wrap_queue(queue.Queue(), "q", min_ready=True),
            "min_ready of queue 'q' must be an int >= 0, got True; leave it out if there is none",
        ),
    ],
)
def test_a_wrong_wrap_is_said_at_once_with_the_remedy(
    wrap: Callable[[Telemetry], Any], said: str, rig: Rig
) -> None:
    for telemetry in (rig.telemetry, Telemetry()):
        with pytest.raises(ConfigError) as error:
            wrap(telemetry)
        assert str(error.value) == said


def test_an_object_that_answers_to_every_name_can_be_wrapped(rig: Rig) -> None:
    anything = Anything()
    assert rig.telemetry.wrap_queue(anything, "q") is anything


def test_the_nowait_methods_of_an_asyncio_queue_can_be_wrapped(rig: Rig, worker: Worker) -> None:
    wrapped = rig.telemetry.wrap_queue(asyncio.Queue[Item](), "q", put="put_nowait", get="get_nowait")
    with worker.step() as step:
        wrapped.put_nowait(Item())
        wrapped.get_nowait()
        mine = step.id
    assert [record.link for record in rig.consumed(worker)] == [(mine, mine)]
