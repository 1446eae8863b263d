"""A context: what an item carries to the step that consumes it, as an int, three words, text or bytes.

192 bits, high to low: the root step of the trace, the step that produced the item, the put time (wall ns).
Queues that are wrapped remember plain ints: the collector tracks an instance of any class that Python code
makes, so a `Context` is made for `Step.produced` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, error
from typing import Any, Final, TypeAlias

CONTEXT_BYTES: Final = 24
_THREE_WORDS: Final = Struct(">3q")

ContextForm: TypeAlias = int | tuple[int, ...] | list[int] | str | bytes


class Context(int):
    """What `Step.produced` returns: an opaque int of 192 bits, and its other forms. `Step.consumed` and
    `Worker.resume` take any of them.

    Pickled it is a plain int, which a process without this package can read.
    """

    __slots__ = ()

    @property
    def words(self) -> tuple[int, int, int]:
        """Three signed 64-bit ints: for an int64 tensor, struct "3q", a repeated field, JSON, msgpack."""
        return _THREE_WORDS.unpack(self.to_bytes(CONTEXT_BYTES, "big"))

    @property
    def text(self) -> str:
        """48 lowercase hex digits: for a header or metadata."""
        return f"{self:048x}"

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Return what gives the plain int."""
        return int, (int(self),)

    def __copy__(self) -> Context:
        """Return the same context."""
        return self

    def __deepcopy__(self, memo: object) -> Context:
        """Return the same context."""
        return self


# Stands for "nothing is captured". No step has these ids. As wide as any context, with a negative word as
# half of all contexts have: what is too small or unsigned fails with it as it does with them.
NULL: Final = Context(((1 << 64) - 1) << 128)


def as_int(form: Any) -> Any:
    """Return the int of a context in any form, 0 for the null context. Anything else is returned as it is,
    unread."""
    kind = type(form)
    data = b""
    if kind is Context:
        form = int(form)
    elif kind is bytes:
        data = form
    try:
        if kind is str and len(form) == 2 * CONTEXT_BYTES:
            data = bytes.fromhex(form)
        elif kind is tuple or kind is list:
            first, second, third = form
            if type(first) is type(second) is type(third) is int:
                data = _THREE_WORDS.pack(first, second, third)
    except (ValueError, error):
        return form
    if len(data) == CONTEXT_BYTES:
        form = int.from_bytes(data, "big")
    return 0 if type(form) is int and form == NULL else form


def issuing(produced: Callable[[], int]) -> Callable[[], Context]:
    """Return `Step.produced` over a writer's, which returns 0 while nothing is captured."""

    def issue() -> Context:
        number = produced()
        return Context(number) if number else NULL

    return issue


def accepting(consumed: Callable[[int], None]) -> Callable[[ContextForm], None]:
    """Return `Step.consumed` over a writer's, which takes an int and refuses anything else."""

    def accept(context: ContextForm) -> None:
        consumed(as_int(context))

    return accept
