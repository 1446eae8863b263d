"""Contexts that travel beside a queue's items. The item is never wrapped: every consumer gets the very object that was put.

The queue keeps its items, `Contexts` a map from an item's identity to its context while the item lies in the queue. On a
`queue.Queue` (and subclasses) the instance's `_put` and `_get` are hooked: they run under the queue's own lock, also for a consumer
that holds the queue from before, and the map's length must fit `_qsize()`, else it starts anew. On any other class the methods
named `put` and `get` are hooked on the instance. `SimpleQueue` cannot be hooked: a proxy stands before it. What cannot be matched
is counted, never guessed.
"""

from __future__ import annotations

import functools
import queue
import weakref
from _thread import get_ident
from collections.abc import Callable
from json import dumps
from types import CodeType
from typing import Any, Final

from otel_dflash.config import ConfigError
from otel_dflash.trainer.contexts import Contexts

HOOKED: Final = "_otel_dflash_contexts"

STANDARD_SIZES: Final = frozenset({queue.Queue._qsize, queue.LifoQueue._qsize, queue.PriorityQueue._qsize})

_proxied: weakref.WeakSet[queue.SimpleQueue[Any]] = weakref.WeakSet()


def describe_queue(name: str, capacity: int | None, min_ready: int | None) -> str:
    """Return the QUEUE name of a queue.

    Raises:
        ConfigError: A number is not one, or below 0.
    """
    for label, value in (("capacity", capacity), ("min_ready", min_ready)):
        if value is not None and (type(value) is not int or value < 0):
            raise ConfigError(f"{label} of queue {name!r} must be an int >= 0, got {value!r}; leave it out when there is none")
    if not isinstance(name, str) or not 1 <= len(name) <= 64:
        raise ConfigError(f"a queue's name must be a str of 1 to 64 characters, got {name!r}; try 'hidden_states'")
    return dumps({"name": name, "capacity": capacity, "min_ready": min_ready})


def hook(target: Any, contexts: Contexts, put: str, get: str) -> Any:
    """Make a queue's items carry contexts; return what to use in its place, the queue itself wherever possible.

    Raises:
        ConfigError: It is wrapped already, has no such methods, or they cannot be replaced.
    """
    if getattr(target, "__dict__", {}).get(HOOKED) or HOOKED in vars(type(target)) or _is_proxied(target):
        raise ConfigError(f"queue {target!r} is wrapped already; wrap it once, where it is made")
    if isinstance(target, queue.Queue) and (put, get) == ("put", "get") and _uses_own_hooks(type(target)):
        return _hook_queue(target, contexts)
    from inspect import iscoroutinefunction  # here: loading it takes milliseconds, and queues are wrapped by name seldom

    for label, name in (("put", put), ("get", get)):
        method = getattr(target, name, None)
        if not callable(method):
            raise ConfigError(f"{type(target).__name__} has no method {name!r}; say {label}=<its {label} method>")
        if iscoroutinefunction(method):
            raise ConfigError(f"{type(target).__name__}.{name} is a coroutine; use step.produced() and step.consumed(context) there")
    # Items may leave by ways of their own, and their ids be used again: there the newest entry is right. Of an object that lies in
    # such a queue twice both contexts arrive, the newest first: it was made by both. A SimpleQueue loses nothing and keeps the order.
    contexts.newest_first = type(target) is not queue.SimpleQueue
    putting: set[int] = set()  # threads that are inside such a method: put_nowait of put, put that takes the oldest item out
    getting: set[int] = set()
    hooks = {name: _putting(target, name, contexts, putting) for name in _with_nowait(target, put)}
    hooks |= {name: _getting(target, name, contexts, putting, getting) for name in _with_nowait(target, get)}
    if not hasattr(target, "__dict__"):
        return _proxy(target, contexts, hooks)
    try:
        for name, function in hooks.items():
            setattr(target, name, _Method(function, target, name))
        setattr(target, HOOKED, contexts)
    except (AttributeError, TypeError) as error:
        say = "use step.produced() and step.consumed(context) instead"
        raise ConfigError(f"methods of a {type(target).__name__} cannot be replaced ({error}); {say}") from None
    return target


class _Method(functools.partial[Any]):
    """A method of one queue, replaced. In a copied or pickled queue it is the class's own again."""

    own: tuple[Any, str]

    def __new__(cls, function: Callable[..., Any], target: Any, name: str) -> _Method:
        """Look like the method that is replaced."""
        method = super().__new__(cls, function)
        functools.update_wrapper(method, getattr(target, name))
        method.own = target, name
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what gives the copy's own method."""
        return getattr, self.own


def _is_proxied(target: Any) -> bool:
    return isinstance(target, queue.SimpleQueue) and type(target) is queue.SimpleQueue and target in _proxied


def _with_nowait(target: Any, name: str) -> list[str]:
    """Return a method and its `_nowait` form, if it has one."""
    nowait = f"{name}_nowait"
    return [name, nowait] if callable(getattr(target, nowait, None)) else [name]


def _uses_own_hooks(kind: type) -> bool:
    """Return whether a subclass of `queue.Queue` still stores by `_put` and `_get`, as far as its code shows; else it is hooked by name."""
    for name in ("put", "get"):
        method = getattr(kind, name)
        code = getattr(method, "__code__", None)
        if method is not getattr(queue.Queue, name) and (code is None or not {f"_{name}", "super", name} & _names(code)):
            return False
    return True


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _unbound(target: Any, name: str) -> Callable[..., Any]:
    """Return a method as a function of the queue first. A hook that held the queue would keep it, and its items, until a collection."""
    method = getattr(target, name)
    if getattr(method, "__self__", None) is target and hasattr(method, "__func__"):
        function: Callable[..., Any] = method.__func__
        return function
    return lambda _, *args, **kwargs: method(*args, **kwargs)


def _reference(target: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target


def _hook_queue(target: Any, contexts: Contexts) -> Any:
    the_queue = _reference(target)
    put_item, get_item, size = (_unbound(target, name) for name in ("_put", "_get", "_qsize"))
    guarded = type(target)._qsize in STANDARD_SIZES  # an own _qsize may count what is ready, not what is there
    contexts.newest_first = not guarded or isinstance(target, queue.LifoQueue)
    putting = False
    emptying = 0  # thread that shuts the queue down: it takes every item out for nobody

    def put_hook(item: Any) -> None:
        nonlocal putting
        owner = the_queue()
        if guarded and contexts.items + contexts.unknown != size(owner):
            contexts.forget(size(owner))
        putting = True
        try:
            put_item(owner, item)
        finally:
            putting = False
        contexts.add(item)

    def get_hook() -> Any:
        owner = the_queue()
        if guarded and not putting and contexts.items + contexts.unknown != size(owner):
            contexts.forget(size(owner))
        item = get_item(owner)
        if putting or emptying == get_ident():
            contexts.drop(item)
        else:
            contexts.match(item)
        return item

    target._put, target._get = put_hook, get_hook
    if hasattr(target, "shutdown"):  # 3.13
        shutdown = _unbound(target, "shutdown")

        def shutdown_hook(*args: Any, **kwargs: Any) -> Any:
            nonlocal emptying
            owner = the_queue()
            if owner is None:
                return None
            emptying = get_ident()
            try:
                return shutdown(owner, *args, **kwargs)
            finally:
                emptying = 0

        target.shutdown = shutdown_hook
    setattr(target, HOOKED, contexts)
    return target


def _putting(target: Any, name: str, contexts: Contexts, putting: set[int]) -> Callable[..., Any]:
    from inspect import signature  # here: see hook

    put = getattr(target, name)
    try:
        keyword = next(iter(signature(put).parameters), "item")
    except (TypeError, ValueError):
        keyword = "item"

    def put_hook(*args: Any, **kwargs: Any) -> Any:
        me = get_ident()
        if me in putting:
            return put(*args, **kwargs)
        item = args[0] if args else kwargs.get(keyword)
        entry = contexts.add(item)  # before: a consumer may have the item before `put` returns
        is_put = False
        try:
            putting.add(me)
            result = put(*args, **kwargs)
            is_put = True
        finally:
            putting.discard(me)
            if not is_put:
                contexts.discard(item, entry)
        contexts.stamp(item, entry)
        return result

    return put_hook


def _getting(target: Any, name: str, contexts: Contexts, putting: set[int], getting: set[int]) -> Callable[..., Any]:
    get = getattr(target, name)

    def get_hook(*args: Any, **kwargs: Any) -> Any:
        me = get_ident()
        if me in getting:
            return get(*args, **kwargs)
        try:
            getting.add(me)
            result = get(*args, **kwargs)
        finally:
            getting.discard(me)
        if me in putting:
            contexts.drop(result)
        else:
            contexts.match_result(result)
        return result

    return get_hook


def _proxy(target: Any, contexts: Contexts, hooks: dict[str, Callable[..., Any]]) -> Any:
    """Stand before an object that cannot be hooked, a `SimpleQueue`: everything else goes to the object itself."""

    class Proxy:
        __slots__ = ("__weakref__",)

        @property  # type: ignore[misc]
        def __class__(self) -> type:  # isinstance sees the queue
            return type(target)

        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(target, name, value)

        def __delattr__(self, name: str) -> None:
            delattr(target, name)

    def forwarding(name: str) -> Callable[..., Any]:
        return lambda _, *args, **kwargs: getattr(target, name)(*args, **kwargs)

    own = [name for name in dir(type(target)) if name[:2] == "__" == name[-2:] and not hasattr(Proxy, name) and name != "__slots__"]
    for name in ("__repr__", "__str__", "__dir__", "__reduce_ex__", *own):
        setattr(Proxy, name, forwarding(name))
    for name, function in hooks.items():
        setattr(Proxy, name, staticmethod(function))
    setattr(Proxy, HOOKED, contexts)
    if type(target) is queue.SimpleQueue:
        _proxied.add(target)
    return Proxy()
