"""Contexts that travel beside a queue's items. The item is never wrapped: every consumer gets the very object that was put.

The queue keeps its items, this file a map from an item's identity to its context while the item lies in the queue. On a
`queue.Queue` (and subclasses) the instance's `_put` and `_get` are hooked: they run under the queue's own lock, also for a consumer
that holds the queue from before, and the map's length must fit `_qsize()`, else it starts anew. On any other class the methods
named `put` and `get` are hooked on the instance. `SimpleQueue` cannot be hooked: a proxy stands before it. What cannot be matched
is counted, never guessed.
"""

from __future__ import annotations

import inspect
import queue
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from json import dumps
from time import monotonic_ns as clock
from typing import TYPE_CHECKING, Any, Final

from otel_dflash.config import ConfigError
from otel_dflash.records import CONTEXT_STEP_SHIFT, Counter

if TYPE_CHECKING:
    from otel_dflash.trainer.writer import Writer

MAP_ITEMS_MAX: Final = 1 << 16  # a queue that loses items by ways of its own must not make the map grow
PENDING_ITEMS_MAX: Final = 64  # per thread: received outside a step, waiting for one
PENDING_THREADS_MAX: Final = 1024
HOOKED: Final = "_otel_dflash_contexts"

STANDARD_SIZES: Final = frozenset({queue.Queue._qsize, queue.LifoQueue._qsize, queue.PriorityQueue._qsize})

# An entry is one int, which the garbage collector does not track: bucket index << 192 | context.
_BUCKET_SHIFT: Final = 192
_CONTEXT_MASK: Final = (1 << _BUCKET_SHIFT) - 1
_BUCKETS_MAX: Final = 1024


class Contexts:
    """The contexts of the items that lie in one queue."""

    def __init__(
        self,
        text: str,
        wall_offset_ns: int,
        current: dict[int, Writer | None],
        pending: dict[int, list[Any]],
        lost: Callable[[Counter], None],
    ) -> None:
        """Start empty; `text` is the queue's QUEUE name."""
        self.text = text
        self.items = 0  # entries, an object put twice counted twice
        self.unknown = 0  # items in the queue that have none
        self._entries: dict[int, int | deque[int]] = {}
        self._bucket_indices: dict[str | int, int] = {}
        self._buckets: list[str | None] = [None]
        self._wall_offset_ns = wall_offset_ns
        self._current = current
        self._pending = pending
        self._lost = lost

    def add(self, item: Any) -> int:
        """Remember the context of an item that is put now; return the entry."""
        writer = self._current.get(get_ident())
        if writer is None:
            self._lost(Counter.OUTSIDE_STEP)
            entry = clock() + self._wall_offset_ns
        else:
            entry = writer.produced() | self._bucket_index(writer.bucket()) << _BUCKET_SHIFT
        key = id(item)
        before = self._entries.get(key)
        if before is None:
            if len(self._entries) >= MAP_ITEMS_MAX:
                self.forget(0)
            self._entries[key] = entry
        elif type(before) is deque:
            before.append(entry)
        else:
            self._entries[key] = deque((before, entry))  # type: ignore[arg-type]
        self.items += 1
        return entry

    def stamp(self, item: Any, entry: int) -> None:
        """Move an item's put time to now: `put` may have waited for room after `add`."""
        entries = self._entries
        key = id(item)
        stamped = entry >> CONTEXT_STEP_SHIFT << CONTEXT_STEP_SHIFT | (clock() + self._wall_offset_ns)
        try:  # no call in here: a consumer cannot take the entry between the two lines
            if entries[key] is entry:
                entries[key] = stamped
        except KeyError:
            pass

    def discard(self, item: Any) -> None:
        """Forget an item whose put failed."""
        entry = self._entries.get(id(item))
        if type(entry) is deque:
            entry.pop()
            self.items -= 1
        else:
            self._take(id(item))

    def match(self, result: Any) -> None:
        """Hand the context of a received item, or of each item of a received list, to the thread's step."""
        entry = self._take(id(result))
        if entry is not None:
            self._deliver(entry)
        elif type(result) is list:
            for item in result:
                entry = self._take(id(item))
                if entry is not None:
                    self._deliver(entry)
                else:
                    self._miss()
        elif result is not None:
            self._miss()

    def forget(self, size: int) -> None:
        """Start anew over a queue of `size` items: it changed by ways that are not hooked."""
        for _ in range(min(self.items, 1)):
            self._lost(Counter.UNMATCHED)
        self._entries.clear()
        self.items = 0
        self.unknown = size

    def deliver_to(self, writer: Writer, t: int, entry: int) -> None:
        """Give an entry, received at monotonic `t`, to the step that is open in this thread."""
        writer.received(self.text, t, entry & _CONTEXT_MASK, self._buckets[entry >> _BUCKET_SHIFT])

    def _take(self, key: int) -> int | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.items -= 1
        if type(entry) is not deque:
            return entry  # type: ignore[return-value]
        first = entry.popleft()
        if entry:
            self._entries[key] = entry
        return first

    def _miss(self) -> None:
        self.unknown = max(0, self.unknown - 1)
        self._lost(Counter.UNMATCHED)

    def _deliver(self, entry: int) -> None:
        me = get_ident()
        writer = self._current.get(me)
        if writer is not None:
            self.deliver_to(writer, clock(), entry)
            return
        if me not in self._pending and len(self._pending) >= PENDING_THREADS_MAX:
            self._pending.clear()
        waiting = self._pending.setdefault(me, [])
        if len(waiting) < 3 * PENDING_ITEMS_MAX:
            waiting += self, clock(), entry
        else:
            self._lost(Counter.UNMATCHED)

    def _bucket_index(self, bucket: str | int | None) -> int:
        if bucket is None:
            return 0
        index = self._bucket_indices.get(bucket)
        if index is None:
            if len(self._buckets) >= _BUCKETS_MAX:
                return 0
            index = self._bucket_indices[bucket] = len(self._buckets)
            self._buckets.append(f"{bucket}")
        return index


def describe_queue(name: str, capacity: int | None, min_ready: int | None) -> str:
    """Return the QUEUE name of a queue.

    Raises:
        ConfigError: A number is not one, or below 0.
    """
    for label, value in (("capacity", capacity), ("min_ready", min_ready)):
        if value is not None and (type(value) is not int or value < 0):
            raise ConfigError(f"{label} of queue {name!r} must be an int >= 0, got {value!r}; leave it out when there is none")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a queue's name must be a non-empty str, got {name!r}; try 'hidden_states'")
    return dumps({"name": name, "capacity": capacity, "min_ready": min_ready})


def hook(target: Any, contexts: Contexts, put: str, get: str) -> Any:
    """Make a queue's items carry contexts; return what to use in its place, the queue itself wherever possible.

    Raises:
        ConfigError: It is wrapped already, or has no such methods.
    """
    if getattr(target, HOOKED, None) is not None:
        raise ConfigError(f"queue {target!r} is wrapped already; wrap it once, where it is made")
    if isinstance(target, queue.Queue) and (put, get) == ("put", "get"):
        return _hook_queue(target, contexts)
    for label, name in (("put", put), ("get", get)):
        method = getattr(target, name, None)
        if not callable(method):
            raise ConfigError(f"{type(target).__name__} has no method {name!r}; say {label}=<its {label} method>")
        if inspect.iscoroutinefunction(method):
            raise ConfigError(f"{type(target).__name__}.{name} is a coroutine; use step.produced() and step.consumed(context) there")
    if not hasattr(target, "__dict__"):
        return _proxy(target, contexts, put, get)
    for name in _with_nowait(target, put):
        setattr(target, name, _putting(getattr(target, name), contexts))
    for name in _with_nowait(target, get):
        setattr(target, name, _getting(getattr(target, name), contexts))
    setattr(target, HOOKED, contexts)
    return target


def _with_nowait(target: Any, name: str) -> list[str]:
    """Return which of a method and its `_nowait` form to hook: where one calls the other, the other alone."""
    nowait = f"{name}_nowait"
    if not callable(getattr(target, nowait, None)):
        return [name]
    for outer, inner in ((nowait, name), (name, nowait)):
        code = getattr(getattr(type(target), outer, None), "__code__", None)
        if code is not None and inner in code.co_names:
            return [inner]
    return [name, nowait]


def _hook_queue(target: Any, contexts: Contexts) -> Any:
    put_item, get_item, size = target._put, target._get, target._qsize
    guarded = type(target)._qsize in STANDARD_SIZES  # an own _qsize may count what is ready, not what is there
    contexts.unknown = size()

    def put_hook(item: Any) -> None:
        put_item(item)
        contexts.add(item)
        if guarded and contexts.items + contexts.unknown != size():
            contexts.forget(size())

    def get_hook() -> Any:
        if guarded and contexts.items + contexts.unknown != size():
            contexts.forget(size())
        item = get_item()
        contexts.match(item)
        return item

    target._put, target._get = put_hook, get_hook
    if hasattr(target, "shutdown"):  # 3.13: an immediate shutdown takes every item out for nobody
        shutdown = target.shutdown

        def shutdown_hook(immediate: bool = False) -> None:
            if immediate:
                with target.mutex:
                    target._get = get_item
            shutdown(immediate)

        target.shutdown = shutdown_hook
    setattr(target, HOOKED, contexts)
    return target


def _putting(put: Callable[..., Any], contexts: Contexts) -> Callable[..., Any]:
    def put_hook(*args: Any, **kwargs: Any) -> Any:
        item = args[0] if args else next(iter(kwargs.values()), None)
        entry = contexts.add(item)  # before: a consumer may have the item before `put` returns
        try:
            result = put(*args, **kwargs)
        except BaseException:
            contexts.discard(item)
            raise
        contexts.stamp(item, entry)
        return result

    return put_hook


def _getting(get: Callable[..., Any], contexts: Contexts) -> Callable[..., Any]:
    def get_hook(*args: Any, **kwargs: Any) -> Any:
        result = get(*args, **kwargs)
        contexts.match(result)
        return result

    return get_hook


def _proxy(target: Any, contexts: Contexts, put: str, get: str) -> Any:
    """Stand before an object that cannot be hooked, a `SimpleQueue`: everything else goes to the object itself."""

    class Proxy:
        __slots__ = ()

        @property  # type: ignore[misc]
        def __class__(self) -> type:  # isinstance sees the queue
            return type(target)

        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def __repr__(self) -> str:
            return repr(target)

    for name in _with_nowait(target, put):
        setattr(Proxy, name, staticmethod(_putting(getattr(target, name), contexts)))
    for name in _with_nowait(target, get):
        setattr(Proxy, name, staticmethod(_getting(getattr(target, name), contexts)))
    setattr(Proxy, HOOKED, contexts)
    return Proxy()
