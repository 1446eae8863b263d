"""A check of restored values against their annotations: a saved file may be damaged, or changed by hand."""

from __future__ import annotations

import math
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def check(value: Any, kind: Any) -> None:
    """Check a value down to its last element, through collections and the fields of classes.

    An int may stand for a float, as in JSON, and a float is finite.

    Raises:
        TypeError: Some part of the value does not have the type that `kind` or a field's annotation states.
    """
    if not _is_of(value, kind):
        raise TypeError(f"not of type {getattr(kind, '__name__', kind)}: {value!r:.100}")


def _is_of(value: Any, kind: Any) -> bool:
    origin: Any = get_origin(kind) or kind
    parts = get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, part) for part in parts)
    if origin is float:
        return type(value) in (int, float) and math.isfinite(value)
    if type(value) is not origin:
        return False
    if origin is dict:
        key, item = parts
        return all(_is_of(name, key) and _is_of(member, item) for name, member in value.items())
    if origin is tuple and ... not in parts:
        return len(value) == len(parts) and all(map(_is_of, value, parts))
    if origin in (list, set, tuple):
        return all(_is_of(member, parts[0]) for member in value)
    return all(_is_of(getattr(value, name), field) for name, field in _fields(kind).items())


@cache
def _fields(kind: type) -> dict[str, Any]:
    """Return the annotated fields of a dataclass or a named tuple; a plain type has none."""
    return get_type_hints(kind)
