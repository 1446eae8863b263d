"""The map from the items in a queue to their contexts. The hooks that use it are in queues.py.

It compares items by identity, never by `==` or `hash()`, and keeps no item alive.
"""

from __future__ import annotations

from _thread import get_ident, get_native_id
from collections import deque
from collections.abc import Callable
from time import monotonic_ns as clock
from typing import TYPE_CHECKING, Any, Final

from otel_dflash.records import CONTEXT_STEP_SHIFT, Counter

if TYPE_CHECKING:
    from otel_dflash.trainer.writer.protocol import OpenStep, Writer

MAP_ITEMS_MAX: Final = 1 << 16  # a queue that loses items in unhooked ways must not make the map grow
PENDING_ITEMS_MAX: Final = 64  # per thread: received outside a step, waiting for one
PENDING_THREADS_MAX: Final = 1024

# An entry is one int, which the garbage collector does not track: receiving thread << 208 | bucket index <<
# 192 | context.
_BUCKET_SHIFT: Final = 192
_BUCKETS_MAX: Final = 1024
_BUCKET_MASK: Final = (1 << 16) - 1
_THREAD_SHIFT: Final = 208
_CONTEXT_MASK: Final = (1 << _BUCKET_SHIFT) - 1


class Contexts:
    """The contexts of the items in one queue.

    No lock: on a `queue.Queue` everything runs under the queue's own. Elsewhere each line that changes the
    map is atomic, and two threads that handle one object at once can at worst lose a context.
    """

    def __init__(
        self,
        text: str,
        wall_offset_ns: int,
        current: dict[int, OpenStep | None],
        pending: dict[int, list[Any]],
        count: Callable[[Counter, int], None],
    ) -> None:
        """Start empty; `text` is the queue's QUEUE name."""
        self.text = text
        self.items = 0  # entries, an object put twice counted twice
        self.unknown = 0  # items in the queue without an entry
        self.newest_first = False  # which of the entries of an object put twice goes first
        self.in_order = False  # whether items leave as they came, so those without an entry first
        self._entries: dict[int, int] = {}
        self._more: dict[int, deque[int]] = {}  # later entries of an object that is in `_entries`
        self._bucket_indices: dict[str | int, int] = {}
        self._buckets: list[str | None] = [None]
        self._wall_offset_ns = wall_offset_ns
        self._current = current
        self._pending = pending
        self._count = count

    def add(self, item: Any, count: int = 1) -> int:
        """Add the context of an item that is being put; return the entry. With `count` 0 the item counts as
        handed on only in `stamp`: the put may still fail."""
        writer = self._current.get(get_ident())
        context = bucket = 0
        if writer is None:
            if count:
                self._count(Counter.OUTSIDE_STEP, 1)
        else:
            # 0: the worker was closed inside its step, or which step is unknown
            context = writer.produced(count)
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
        """Count an item that `put` has taken, and move its put time to now: `put` may have waited for room
        after `add`."""
        writer = self._current.get(get_ident())
        if writer is None:
            self._count(Counter.OUTSIDE_STEP, 1)
        else:
            writer.produced()
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
        more = self._more.get(key)
        try:
            if self._entries.get(key) is not entry:
                self._more[key].remove(entry)
            elif more:
                self._replace_first(key, more.popleft())
            else:
                del self._entries[key]
        except (LookupError, ValueError):  # a consumer has taken it
            return
        self.items -= 1
        if more is not None and not more:
            self._more.pop(key, None)

    def match(self, item: Any) -> None:
        """Give the context of a received item to the thread's step."""
        entry = None if self.unknown and self.in_order else self._take(id(item))
        if entry is not None:
            self._deliver(entry)
        else:
            self.unknown = max(0, self.unknown - 1)
            self._count(Counter.UNMATCHED, 1)

    def match_result(self, result: Any) -> None:
        """Give on the contexts of a get method's result: an item, a list of items, or None for nothing."""
        entry = self._take(id(result))
        if entry is not None:
            self._deliver(entry)
        elif type(result) is list:
            for item in result:
                self.match(item)
        elif result is not None:
            self._count(Counter.UNMATCHED, 1)

    def drop(self, item: Any) -> None:
        """Forget an item that the queue itself removed."""
        self.drop_id(id(item))

    def drop_id(self, key: int) -> None:
        """Forget the item of that id, which the queue itself removed."""
        if self._take(key) is None:
            self.unknown = max(0, self.unknown - 1)
        self._count(Counter.EVICTED, 1)

    def evict_unknown(self, items: int) -> None:
        """Forget items without an entry, which the queue itself removed."""
        self.unknown -= items
        self._count(Counter.EVICTED, items)

    def refuse(self, item: Any, entry: int) -> None:
        """Forget an item that the queue did not take, although its put did not fail."""
        self.discard(item, entry)
        self._count(Counter.EVICTED, 1)

    def forget(self, size: int) -> None:
        """Start over with a queue of `size` items, which has changed in ways that are not hooked."""
        if self.items:
            self._count(Counter.UNMATCHED, 1)
        self._count(Counter.EVICTED, max(0, self.items + self.unknown - size))
        self._entries.clear()
        self._more.clear()
        self.items = 0
        self.unknown = size

    def deliver_to(self, writer: Writer, t: int, entry: int) -> None:
        """Give an entry that this thread received outside a step, at monotonic `t`, to its new step."""
        if entry >> _THREAD_SHIFT == get_native_id():
            self._record(writer, t, entry)
        else:  # left by an ended thread whose ident was reused; native ids are reused later
            self._count(Counter.UNMATCHED, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None: a copied or pickled queue has no contexts."""
        return type(None), ()

    def _record(self, writer: OpenStep, t: int, entry: int) -> None:
        writer.received(
            self.text, t, entry & _CONTEXT_MASK, self._buckets[entry >> _BUCKET_SHIFT & _BUCKET_MASK]
        )

    def _take(self, key: int) -> int | None:
        more = self._more.get(key) if self._more else None
        if more is None:
            entry = self._entries.pop(key, None)
        else:
            try:
                entry = more.pop() if self.newest_first else self._replace_first(key, more.popleft())
            except IndexError:  # another thread has taken the last of them
                entry = self._entries.pop(key, None)
            if not more:
                self._more.pop(key, None)
        if entry is not None:
            self.items -= 1
        return entry

    def _replace_first(self, key: int, entry: int) -> int:
        """Put a later entry of an object in the place of its first; return the first."""
        entries = self._entries
        try:  # no call in here: another thread cannot take the first between reading and replacing it
            first, entries[key] = entries[key], entry
        except KeyError:  # another thread has taken it
            return entry
        return first

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
            self._count(Counter.UNMATCHED, 1)

    def _bucket_index(self, bucket: str | int) -> int:
        index = self._bucket_indices.get(bucket)
        if index is None:
            if len(self._buckets) >= _BUCKETS_MAX:
                return 0
            index = self._bucket_indices[bucket] = len(self._buckets)
            self._buckets.append(f"{bucket}")
        return index
