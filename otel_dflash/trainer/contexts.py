"""The map from the items that lie in a queue to their contexts. What puts and gets call it from is in queues.py.

It goes by an item's identity, never by its `==` or `hash()`, and keeps no item alive.
"""

from __future__ import annotations

from _thread import get_ident, get_native_id
from collections import deque
from collections.abc import Callable
from time import monotonic_ns as clock
from typing import TYPE_CHECKING, Any, Final

from otel_dflash.records import CONTEXT_STEP_SHIFT, Counter

if TYPE_CHECKING:
    from otel_dflash.trainer.worker import Writer

MAP_ITEMS_MAX: Final = 1 << 16  # a queue that loses items by ways of its own must not make the map grow
PENDING_ITEMS_MAX: Final = 64  # per thread: received outside a step, waiting for one
PENDING_THREADS_MAX: Final = 1024

# An entry is one int, which the garbage collector does not track: receiving thread << 208 | bucket index << 192 | context.
_BUCKET_SHIFT: Final = 192
_BUCKETS_MAX: Final = 1024
_BUCKET_MASK: Final = (1 << 16) - 1
_THREAD_SHIFT: Final = 208
_CONTEXT_MASK: Final = (1 << _BUCKET_SHIFT) - 1


class Contexts:
    """The contexts of the items that lie in one queue.

    Without a lock: on a `queue.Queue` all runs under the queue's own, elsewhere each line that changes the map is atomic, and two
    threads that handle one object at once can at worst lose a context.
    """

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
        self.newest_first = False  # which of the entries of an object put twice goes first
        self._entries: dict[int, int] = {}
        self._more: dict[int, deque[int]] = {}  # later entries of an object that is in `_entries`
        self._bucket_indices: dict[str | int, int] = {}
        self._buckets: list[str | None] = [None]
        self._wall_offset_ns = wall_offset_ns
        self._current = current
        self._pending = pending
        self._lost = lost

    def add(self, item: Any) -> int:
        """Remember the context of an item that is put now; return the entry."""
        writer = self._current.get(get_ident())
        context = bucket = 0
        if writer is None:
            self._lost(Counter.OUTSIDE_STEP)
        else:
            context = writer.produced()  # 0 where the worker was closed inside its step
            value = writer.bucket()
            if value is not None:
                bucket = self._bucket_index(value)
        entry = (context or clock() + self._wall_offset_ns) | bucket << _BUCKET_SHIFT
        if self.items >= MAP_ITEMS_MAX:
            self.forget(self.items + self.unknown)
        if self._entries.setdefault(id(item), entry) is not entry:
            self._more.setdefault(id(item), deque()).append(entry)
        self.items += 1
        return entry

    def stamp(self, item: Any, entry: int) -> None:
        """Move an item's put time to now: `put` may have waited for room after `add`."""
        entries = self._entries
        key = id(item)
        more = self._more.get(key)
        stamped = entry >> CONTEXT_STEP_SHIFT << CONTEXT_STEP_SHIFT | (clock() + self._wall_offset_ns)
        try:  # no call in here: a consumer cannot take the entry between the two lines
            if entries[key] is entry:
                entries[key] = stamped
            elif more is not None and more[-1] is entry:
                more[-1] = stamped
        except (KeyError, IndexError):
            pass

    def discard(self, item: Any, entry: int) -> None:
        """Forget an item whose put failed."""
        key = id(item)
        more = self._more.get(key, ())
        if entry in more:
            more.remove(entry)  # type: ignore[union-attr]
            self.items -= 1
        elif self._entries.get(key) is entry:
            self._take(key)

    def match(self, item: Any) -> None:
        """Hand the context of a received item to the thread's step."""
        entry = self._take(id(item))
        if entry is not None:
            self._deliver(entry)
        else:
            self.unknown = max(0, self.unknown - 1)
            self._lost(Counter.UNMATCHED)

    def match_result(self, result: Any) -> None:
        """Hand on the context of what a get method returned: an item, a list of items, or None for nothing."""
        entry = self._take(id(result))
        if entry is not None:
            self._deliver(entry)
        elif type(result) is list:
            for item in result:
                self.match(item)
        elif result is not None:
            self._lost(Counter.UNMATCHED)

    def drop(self, item: Any) -> None:
        """Forget an item that the queue itself took out, for nobody."""
        if self._take(id(item)) is None:
            self.unknown = max(0, self.unknown - 1)

    def forget(self, size: int) -> None:
        """Start anew over a queue of `size` items: it changed by ways that are not hooked."""
        if self.items:
            self._lost(Counter.UNMATCHED)
        self._entries.clear()
        self._more.clear()
        self.items = 0
        self.unknown = size

    def deliver_to(self, writer: Writer, t: int, entry: int) -> None:
        """Give an entry that this thread received at monotonic `t`, outside a step, to the step that it entered now."""
        if entry >> _THREAD_SHIFT == get_native_id():
            self._record(writer, t, entry)
        else:  # a thread that has ended had this thread's ident, which is used again; native ids are not for long
            self._lost(Counter.UNMATCHED)

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind when the queue is copied or pickled: to None."""
        return type(None), ()

    def _record(self, writer: Writer, t: int, entry: int) -> None:
        writer.received(self.text, t, entry & _CONTEXT_MASK, self._buckets[entry >> _BUCKET_SHIFT & _BUCKET_MASK])

    def _take(self, key: int) -> int | None:
        more = self._more.get(key) if self._more else None
        if more is None:
            entry = self._entries.pop(key, None)
        elif self.newest_first:
            try:
                entry = more.pop()
            except IndexError:
                entry = self._entries.pop(key, None)
        else:
            entry = self._entries[key]
            self._entries[key] = more.popleft()
        if entry is not None:
            self.items -= 1
        if more is not None and not more:
            self._more.pop(key, None)
        return entry

    def _deliver(self, entry: int) -> None:
        me = get_ident()
        writer = self._current.get(me)
        if writer is not None:
            self._record(writer, clock(), entry)
            return
        if me not in self._pending and len(self._pending) >= PENDING_THREADS_MAX:
            self._pending.clear()
        waiting = self._pending.setdefault(me, [])
        if len(waiting) < 3 * PENDING_ITEMS_MAX:
            waiting += self, clock(), entry | get_native_id() << _THREAD_SHIFT
        else:
            self._lost(Counter.UNMATCHED)

    def _bucket_index(self, bucket: str | int) -> int:
        index = self._bucket_indices.get(bucket)
        if index is None:
            if len(self._buckets) >= _BUCKETS_MAX:
                return 0
            index = self._bucket_indices[bucket] = len(self._buckets)
            self._buckets.append(f"{bucket}")
        return index
