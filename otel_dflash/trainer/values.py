"""What may be recorded of a user's values: decided by exact type, so that a tensor or a numpy scalar is never read.

Nothing here raises: a class of the user's may do anything where it can.
"""

from __future__ import annotations

import queue
from struct import Struct
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from otel_dflash.records import OTHER_NAME, WORD_MASK, Counter, NameKind, ValueType

if TYPE_CHECKING:
    from otel_dflash.ring import Ring

NATURAL_MAX: Final = (1 << 63) - 1
CONTEXT_MAX: Final = (1 << 192) - 1  # 24 bytes
THREAD_NAME_MAX: Final = 128
OUTCOMES: Final = (queue.Empty, queue.Full, StopIteration, StopAsyncIteration, GeneratorExit)
OUTCOME_NAMES: Final = frozenset(
    {"queue.ShutDown", "asyncio.queues.QueueEmpty", "asyncio.queues.QueueFull", "asyncio.queues.QueueShutDown"}
)

_WORD, _DOUBLE = Struct("<Q"), Struct("<d")
_JSON_ESCAPES: Final = {34: '\\"', 92: "\\\\"} | dict.fromkeys(range(32), " ")


def type_name(kind: type) -> str:
    """Return a type's name as error.type wants it: qualified, but for builtins. OTHER_NAME where a metaclass does not say."""
    try:
        return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    except Exception:  # noqa: BLE001  the metaclass is the user's
        return OTHER_NAME


def error_type(kind: type[BaseException]) -> str | None:
    """Return the error.type of an exception, None for an outcome that is no error (an empty queue, the end of an iterator)."""
    if issubclass(kind, OUTCOMES):
        return None
    name = type_name(kind)
    return None if name in OUTCOME_NAMES else name


def error_id(ring: Ring, kind: type[BaseException] | None) -> int:
    """Return the name id of an error, 0 for none and for an outcome that is no error."""
    text = error_type(kind) if kind is not None else None
    return ring.intern(NameKind.TEXT, text) if text is not None else 0


def natural(ring: Ring, key: str, value: Any, largest: int, otherwise: int) -> int:
    """Return an int of 0..largest as it is; any other value is refused, and what was there `otherwise` stays."""
    if type(value) is int and 0 <= value <= largest:
        return value
    refuse(ring, key, value)
    return otherwise


def refuse(ring: Ring, key: str, value: Any) -> None:
    """Count a value that must not be read or does not fit, and let the agent say which."""
    ring.count(Counter.DROPPED_VALUE)
    ring.intern(NameKind.REFUSED, f"{key} {type_name(type(value))}")


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
    return f'{{"id": {thread.native_id or 0}, "name": "{thread.name[:THREAD_NAME_MAX].translate(_JSON_ESCAPES)}"}}'
