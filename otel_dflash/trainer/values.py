"""Recording of a user's values, decided by exact type, so that a tensor is never read.

Nothing here raises. A user's class or metaclass may do anything in its methods: types are compared by
identity, never by `==` or hash().
"""

from __future__ import annotations

import queue
import sys
from struct import Struct
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from otel_dflash.records import (
    NAME_SHIFT,
    OTHER_NAME,
    OTHER_NAME_ID,
    RESIDENCE_NS_MAX,
    WORD_MASK,
    Counter,
    NameKind,
    ValueType,
)

if TYPE_CHECKING:
    from otel_dflash.ring import Ring

NATURAL_MAX: Final = (1 << 63) - 1
CONTEXT_MAX: Final = (1 << 192) - 1  # 24 bytes
THREAD_NAME_MAX: Final = 128
OUTCOMES: Final = (queue.Empty, queue.Full, StopIteration, StopAsyncIteration, GeneratorExit)
OUTCOME_NAMES: Final = frozenset(
    {
        "queue.ShutDown",
        "asyncio.queues.QueueEmpty",
        "asyncio.queues.QueueFull",
        "asyncio.queues.QueueShutDown",
    }
)

# on 3.10 and 3.11 reading a member of an enum is a call
KEY, VALUE = int(NameKind.TEXT), int(NameKind.VALUE)
_INT, _FLOAT, _TEXT, _BOOL = map(int, ValueType)

_INTEGERS: Final = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "longlong",
    "ulonglong",
)
_FLOATING: Final = ("float16", "float32", "float64", "longdouble")
_NUMPY_SCALARS: Final[dict[str, type]] = {
    "bool_": bool,
    **dict.fromkeys(_INTEGERS, int),
    **dict.fromkeys(_FLOATING, float),
}

_WORD, _DOUBLE = Struct("<Q"), Struct("<d")
_JSON_ESCAPES: Final = {34: '\\"', 92: "\\\\"} | dict.fromkeys(range(32), " ")


def type_name(kind: type) -> str:
    """Return a type's name for error.type: qualified except for builtins, OTHER_NAME if reading it fails."""
    try:
        return (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
    except Exception:  # noqa: BLE001  the metaclass is the user's
        return OTHER_NAME


def error_type(kind: type) -> str | None:
    """Return the error.type of an exception class, None for an outcome that is not an error.

    Such outcomes are an empty queue and the end of an iterator.
    """
    if issubclass(kind, OUTCOMES):
        return None
    name = type_name(kind)
    return None if name in OUTCOME_NAMES else name


def error_id(ring: Ring, error: Any) -> int:
    """Return the name id of an exception or its class; 0 for None and for an outcome that is not an error."""
    if error is None:
        return 0
    kind = type(error)
    text = error_type(error if issubclass(kind, type) else kind)
    return ring.intern(NameKind.TEXT, text) if text is not None else 0


def natural(ring: Ring, key: str, value: Any, otherwise: int, largest: int = NATURAL_MAX) -> int:
    """Return an int of 0..largest unchanged; refuse any other value and return `otherwise`."""
    number = value if type(value) is int else unboxed(value)
    if type(number) is int and 0 <= number <= largest:
        return number
    refuse(ring, key, value)
    return otherwise


def as_context(ring: Ring, value: Any, wall_ns: int) -> int:
    """Return an int of 24 bytes unchanged, which arrives at `wall_ns`; refuse anything else and return 0.

    A put time that cannot be one is counted: the item has no residence.
    """
    context = natural(ring, "context", value, 0, CONTEXT_MAX)
    if context and abs(wall_ns - (context & WORD_MASK)) > RESIDENCE_NS_MAX:
        refuse(ring, "put_time", context)
    return context


def label(ring: Ring, key: str, value: Any) -> tuple[str | int, int] | None:
    """Return a str or an int and the name id of its text; refuse anything else and return None.

    If the ring has no room for more strings, the key is recorded: the agent reports it.
    """
    kind = type(value)
    kept = value if kind is str or kind is int else unboxed(value)
    kind = type(kept)
    if kind is str or (kind is int and -NATURAL_MAX <= kept <= NATURAL_MAX):
        name_id = ring.intern(VALUE, f"{kept}")
        if name_id == OTHER_NAME_ID:
            ring.intern(NameKind.OVERFLOWED, key)
        return kept, name_id
    refuse(ring, key, value)
    return None


def encode(ring: Ring, key: str, value: Any) -> tuple[int, int, int] | None:
    """Return the words of an ATTRIBUTE: (key's name id, shifted; ValueType; word); None if refused."""
    kind = type(value)
    if kind is float:
        value_type, word = _FLOAT, _WORD.unpack(_DOUBLE.pack(value))[0]
    elif kind is bool:
        value_type, word = _BOOL, 1 if value else 0
    elif kind is int and -NATURAL_MAX <= value <= NATURAL_MAX:
        value_type, word = _INT, value & WORD_MASK
    elif kind is str:
        value_type, word = _TEXT, ring.intern(VALUE, value)
        if word == OTHER_NAME_ID:
            ring.intern(NameKind.OVERFLOWED, key)
    else:
        number = unboxed(value)
        if number is not value:
            return encode(ring, key, number)
        refuse(ring, key, value)
        return None
    return ring.intern(KEY, key) << NAME_SHIFT, value_type, word


def unboxed(value: Any) -> Any:
    """Return a numpy scalar as Python's own number, and anything else as it is, unread.

    Checked by numpy's own types if it is loaded: an ABC such as numbers.Real would accept a lazy number whose
    reading waits for a device. Only a plain module is read: another object may import numpy on access.
    """
    numpy = sys.modules.get("numpy")
    if type(numpy) is type(sys):
        kind, names = type(value), numpy.__dict__
        for name, number in _NUMPY_SCALARS.items():
            if kind is names.get(name):
                return number(value)
    return value


def refuse(ring: Ring, key: str, value: Any) -> None:
    """Count a value that must not be read or is out of range, and let the agent report it."""
    ring.count(Counter.DROPPED_VALUE)
    ring.intern(NameKind.REFUSED, f"{key} {type_name(type(value))}")


def describe_thread(thread: Thread) -> str:
    """Return the JSON of a THREAD name, without loading an encoder."""
    return (
        f'{{"id": {thread.native_id or 0}, "name": '
        f'"{thread.name[:THREAD_NAME_MAX].translate(_JSON_ESCAPES)}"}}'
    )
