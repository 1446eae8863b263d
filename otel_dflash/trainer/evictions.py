"""Items that a queue drops when one is put: `deque(maxlen)`, or a `_put` of its own.

Seen for a queue whose items come in at the right of a deque and leave at the left. After a put, what is at
both ends tells what has left, without a search: the oldest items, or the one that was put. Whatever else
happened cannot be told: the contexts of the whole queue are forgotten, so that no item inherits one whose
memory, and so whose id, it was given.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from otel_dflash.trainer.contexts import Contexts


class Evictions:
    """Keeps the contexts of such a queue true. Everything runs under the queue's own lock."""

    def __init__(self, contexts: Contexts) -> None:
        """Watch a queue; `contexts` are those of its items."""
        self._contexts = contexts
        # ids of the items that have a context, in the order of the queue; fewer if the order is not known
        self._ids: deque[int] = deque()
        self._last = 0  # id of the item at the right after the newest put

    def put(self, item: Any, entry: int, queued: Any) -> None:
        """Note an item whose context was just added, and forget what its put has dropped from `queued`."""
        ids, contexts = self._ids, self._contexts
        if contexts.items == 1:  # or they were forgotten before
            ids.clear()
        if len(ids) == contexts.items - 1:
            ids.append(id(item))
        else:
            ids.clear()
        before = contexts.items + contexts.unknown - 1
        # The queue ended with this object before: taken or refused? Known for a `maxlen` alone.
        is_again = before > 0 and self._last == id(item)
        self._last = id(queued[-1]) if queued else 0
        lost = before + 1 - len(queued)
        if lost <= 0:
            if not queued or queued[-1] is not item:
                ids.clear()
        elif len(ids) < contexts.items or type(queued) is not deque or (is_again and queued.maxlen is None):
            self._start_over(queued)
        elif self._is_oldest(lost, item, queued):
            unknown = min(lost, contexts.unknown)
            contexts.evict_unknown(unknown)
            for _ in range(lost - unknown):
                contexts.drop_id(ids.popleft())
        elif lost == 1 and self._is_refused(item, queued):
            contexts.refuse(item, entry)
            ids.pop()
        else:
            self._start_over(queued)

    def got(self, item: Any) -> None:
        """Note that an item was taken out, after its context was."""
        ids = self._ids
        if len(ids) > self._contexts.items:
            if ids[0] == id(item):
                ids.popleft()
            else:
                ids.clear()

    def _is_oldest(self, lost: int, item: Any, queued: deque[Any]) -> bool:
        """Return whether it is the `lost` oldest items that have left."""
        unknown = self._contexts.unknown
        first, known = max(0, unknown - lost), max(0, lost - unknown)
        if not queued:
            return True
        oldest = id(queued[first])
        # The same object at the front twice: which of its contexts has left is known for a `maxlen` alone.
        is_clear = not known or oldest != self._ids[0] or queued.maxlen is not None
        return queued[-1] is item and oldest == self._ids[known] and is_clear

    def _is_refused(self, item: Any, queued: deque[Any]) -> bool:
        """Return whether the item is not in, and both ends are what they were."""
        ids, unknown = self._ids, self._contexts.unknown
        if queued[-1] is item:
            return False
        return len(ids) == 1 or (id(queued[unknown]) == ids[0] and id(queued[-1]) == ids[-2])

    def _start_over(self, queued: Any) -> None:
        self._contexts.forget(len(queued))
        self._ids.clear()
