"""What may be recorded of a user's values: decided by exact type, so that a tensor or a numpy scalar is never read."""

from __future__ import annotations

import queue
from struct import Struct
from threading import Thread
from typing import Any, Final

from otel_dflash.records import WORD_MASK, ValueType

NATURAL_MAX: Final = (1 << 63) - 1
CONTEXT_MAX: Final = (1 << 192) - 1
OUTCOMES: Final = (queue.Empty, queue.Full, StopIteration, StopAsyncIteration, GeneratorExit)
OUTCOME_NAMES: Final = frozenset({"queue.ShutDown", "asyncio.queues.QueueEmpty", "asyncio.queues.QueueFull"})

_WORD, _DOUBLE = Struct("<Q"), Struct("<d")
_JSON_ESCAPES: Final = {34: '\\"', 92: "\\\\"} | dict.fromkeys(range(32), " ")


def type_name(kind: type) -> str:
    """Return a type's name as error.type wants it: qualified, but for builtins."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def error_type(kind: type[BaseException]) -> str | None:
    """Return the error.type of an exception, None for an outcome that is no error (an empty queue, the end of an iterator)."""
    if issubclass(kind, OUTCOMES):
        return None
    name = type_name(kind)
    return None if name in OUTCOME_NAMES else name


def is_natural(value: Any) -> bool:
    """Return whether the value is an int of 0..2**63-1."""
    return type(value) is int and 0 <= value <= NATURAL_MAX


def is_context(value: Any) -> bool:
    """Return whether the value can be a context: an int of 24 bytes."""
    return type(value) is int and 0 <= value <= CONTEXT_MAX


def encode(value: Any) -> tuple[int, int] | None:
    """Return (ValueType, word) of a number or bool, None for anything else."""
    kind = type(value)
    if kind is float:
        return ValueType.FLOAT, _WORD.unpack(_DOUBLE.pack(value))[0]
    if kind is bool:
        return ValueType.BOOL, 1 if value else 0
    if kind is int and -NATURAL_MAX <= value <= NATURAL_MAX:
        return ValueType.INT, value & WORD_MASK
    return None


def describe_thread(thread: Thread) -> str:
    """Return the JSON of a THREAD name, without loading an encoder."""
    return f'{{"id": {thread.native_id or 0}, "name": "{thread.name.translate(_JSON_ESCAPES)}"}}'
