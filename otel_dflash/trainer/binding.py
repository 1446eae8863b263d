"""Two ways to record: a class whose methods are a writer's closures, and a function around another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

from otel_dflash.config import ConfigError

# Flags of a generator, a coroutine, a function that types.coroutine made one, an asynchronous generator.
_SUSPENDING: Final = 0x20 | 0x80 | 0x100 | 0x200


def bound_class(plain: Any, closures: dict[str, Any]) -> Any:
    """Return a subclass of an object's class whose methods are those closures: a static one is called without
    making a bound method. Each has the name, signature and documentation of the method that it replaces."""
    kind = type(plain)
    unbound = kind()
    methods = {
        name: staticmethod(functools.update_wrapper(closure, getattr(unbound, name)))
        for name, closure in closures.items()
    }
    own = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__}
    with_statement = {"__enter__": methods["begin"], "__exit__": methods["end"]}
    return type(kind.__name__, (kind,), {**own, **methods, **with_statement})


def described(part: Any) -> str:
    """Return the repr of a worker, a phase or a step: what it is, whose, and whether it records."""
    kind, worker, name = type(part).__name__, part, ""
    origin = getattr(part, "_origin", None)
    if origin == ():
        return f"<{kind}, off>"
    if origin:
        make, (first, *_) = origin
        worker, name = (make.__self__, f" {first} of") if isinstance(first, str) else (first, " of")
    state = "closed" if worker._closed else "off" if worker._writer is None else "on"
    return f"<{kind}{name} {worker.role} {worker.index}, {state}>"


def suspends(function: Any) -> bool:
    """Return whether the call of a callable only makes a coroutine or a generator, also through
    functools.partial and `__call__`."""
    inner = _unwrapped(function)
    codes = [getattr(called, "__code__", None) for called in (inner, _unwrapped(type(inner).__call__))]
    return any(isinstance(code, CodeType) and code.co_flags & _SUSPENDING for code in codes)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def recorded(span: Any, function: Any, what: str) -> Callable[..., Any]:
    """Return a function that calls another inside a phase or a step.

    Raises:
        ConfigError: It is not callable, or its call only makes a coroutine or a generator.
    """
    if not callable(function) or suspends(function):
        inner = _unwrapped(function)
        kind = type(inner).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        name = getattr(inner, "__qualname__", f"{article} {kind}")
        raise ConfigError(f"{what} records the calls of a plain function, not {name}; use `with` there")

    @functools.wraps(function)
    def recording(*args: Any, **kwargs: Any) -> Any:
        with span:
            return function(*args, **kwargs)

    return recording
