"""Contexts that travel beside a queue's items. Items are never wrapped: a consumer gets the object put.

The queue keeps its items; `Contexts` maps an item's identity to its context while the item is in the queue.
On a `queue.Queue` the instance's `_put` and `_get` are hooked: they run under the queue's own lock, also for
a consumer that got the queue before it was wrapped. If the map's length does not match `_qsize()`, it is
cleared; what a put drops is told apart where it can be (evictions.py). On any other class, and on a subclass
that overrides `put` or `get`, those methods are hooked on the instance: only its author knows whether the
overrides reach `_put` and `_get`, and can name those instead. `SimpleQueue` cannot be hooked: a proxy takes
its place. Items that cannot be matched are counted, never guessed.
"""

from __future__ import annotations

import functools
import queue
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from json import dumps
from typing import Any, Final

from otel_dflash.config import ConfigError
from otel_dflash.trainer.binding import suspends
from otel_dflash.trainer.contexts import Contexts
from otel_dflash.trainer.evictions import Evictions

HOOKED: Final = "_otel_dflash_contexts"

STANDARD_SIZES: Final = frozenset({queue.Queue._qsize, queue.LifoQueue._qsize, queue.PriorityQueue._qsize})

# by id: wrapped queues that do not show it, because a proxy took their place or telemetry is off
_unmarked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def describe_queue(name: str, capacity: int | None, min_ready: int | None) -> str:
    """Return the QUEUE name of a queue.

    Raises:
        ConfigError: A number is not an int >= 0, or the name is not a str of 1 to 64 characters.
    """
    for label, value in (("capacity", capacity), ("min_ready", min_ready)):
        if value is not None and (type(value) is not int or value < 0):
            raise ConfigError(
                f"{label} of queue {name!r} must be an int >= 0, got {value!r}; leave it out if there is none"
            )
    if not isinstance(name, str) or not 1 <= len(name) <= 64:
        raise ConfigError(
            f"a queue's name must be a str of 1 to 64 characters, got {name!r}; try 'hidden_states'"
        )
    return dumps({"name": name, "capacity": capacity, "min_ready": min_ready})


def hook(target: Any, contexts: Contexts | None, put: str, get: str) -> Any:
    """Let contexts travel beside a queue's items; return the queue, or a proxy to use in its place.

    Without `contexts` telemetry is off: all is checked, and the queue stays as it is.

    Raises:
        ConfigError: The queue is a class, is wrapped already, lacks the methods, or they cannot be replaced.
    """
    _check(target, put, get)
    is_standard = isinstance(target, queue.Queue) and (
        (put, get) == ("_put", "_get") or ((put, get) == ("put", "get") and _inherits(target, put, get))
    )
    if not is_standard:
        _check_method(target, "put", put)
        _check_method(target, "get", get)
    if contexts is None:
        _leave_unmarked(target)
        return target
    if is_standard:
        return _hook_queue(target, contexts)
    # Items may leave by other methods, and their ids be reused: then the newest entry is right. If an object
    # is in such a queue twice, both contexts arrive, the newest first. A SimpleQueue loses nothing and keeps
    # the order.
    contexts.newest_first = type(target) is not queue.SimpleQueue
    # threads inside such a method: put may call put_nowait, or get to remove the oldest item
    putting: set[int] = set()
    getting: set[int] = set()
    hooks = {name: _putting(target, name, contexts, putting) for name in _with_nowait(target, put)}
    hooks |= {name: _getting(target, name, contexts, putting, getting) for name in _with_nowait(target, get)}
    if not hasattr(target, "__dict__"):
        return _proxy(target, contexts, hooks)
    for name, function in hooks.items():
        setattr(target, name, _Method(function, target, name))
    setattr(target, HOOKED, contexts)
    return target


def _check(target: Any, put: str, get: str) -> None:
    """Check what `wrap_queue` was given, whatever the queue's kind.

    Raises:
        ConfigError: The queue is a class or is wrapped already, or a method's name is not a str.
    """
    for label, name in (("put", put), ("get", get)):
        if not isinstance(name, str):
            raise ConfigError(f"{label} must be the name of a method, got {name!r}; try {label}={label!r}")
    if isinstance(target, type):
        raise ConfigError(f"wrap_queue needs a queue, got the class {target.__name__}; create one first")
    is_marked = getattr(target, "__dict__", {}).get(HOOKED) or HOOKED in vars(type(target))
    if is_marked or _unmarked.get(id(target)) is target:
        raise ConfigError(f"queue {target!r} is wrapped already; wrap it once, where it is created")


def _check_method(target: Any, label: str, name: str) -> None:
    """Check that a method can be hooked, by replacing it with itself; nothing changes.

    Raises:
        ConfigError: There is no such method, its call only makes a coroutine, or it cannot be replaced.
    """
    kind = type(target).__name__
    method = getattr(target, name, None)
    if not callable(method):
        raise ConfigError(f"{kind} has no method {name!r}; set {label}=<its {label} method>")
    if suspends(method):
        raise ConfigError(
            f"{kind}.{name} is a coroutine or a generator; use step.produced() and step.consumed(context) "
            "there"
        )
    if not hasattr(target, "__dict__"):  # a proxy takes its place
        return
    is_own = name in vars(target)
    try:
        setattr(target, name, method)
        if not is_own:
            delattr(target, name)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"methods of a {kind} cannot be replaced ({error}); use step.produced() and "
            "step.consumed(context) instead"
        ) from None


def _leave_unmarked(target: Any) -> None:
    """Remember that a queue is wrapped without changing it."""
    with suppress(TypeError):  # no weak reference to it can exist
        _unmarked[id(target)] = target


class _Method(functools.partial[Any]):
    """A method of one queue, replaced. In a copied or pickled queue it is the class's own again."""

    own: tuple[Any, str]

    def __new__(cls, function: Callable[..., Any], target: Any, name: str) -> _Method:
        """Take the name and docstring of the replaced method."""
        method = super().__new__(cls, function)
        functools.update_wrapper(method, getattr(target, name))
        method.own = target, name
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the copy's own method."""
        return getattr, self.own


def _with_nowait(target: Any, name: str) -> list[str]:
    """Return a method and its `_nowait` form, if it has one."""
    nowait = f"{name}_nowait"
    return [name, nowait] if callable(getattr(target, nowait, None)) else [name]


def _inherits(target: Any, *names: str) -> bool:
    """Return whether neither a subclass nor the instance itself overrides methods of `queue.Queue`."""
    return all(
        getattr(getattr(target, name), "__func__", None) is getattr(queue.Queue, name) for name in names
    )


def _may_evict(target: Any) -> bool:
    """Return whether items go through a deque from right to left, and a put may drop some."""
    queued = getattr(target, "queue", None)
    is_bounded = isinstance(queued, deque) and (queued.maxlen is not None or not _inherits(target, "_put"))
    return is_bounded and _inherits(target, "_get")


def _unbound(target: Any, name: str) -> Callable[..., Any]:
    """Return a method as a function whose first argument is the queue.

    A hook that held the queue would keep it and its items alive until a garbage collection.
    """
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
    # an own _qsize may count what is ready, not what is there
    guarded = type(target)._qsize in STANDARD_SIZES
    contexts.newest_first = not guarded or isinstance(target, queue.LifoQueue)
    contexts.in_order = guarded and _inherits(target, "_put", "_get")
    evictions = Evictions(contexts) if guarded and _may_evict(target) else None
    putting = False
    emptying = 0  # the thread that shuts the queue down, discarding every item

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
        entry = contexts.add(item)
        if evictions is not None:
            evictions.put(item, entry, owner.queue)

    def get_hook() -> Any:
        owner = the_queue()
        if guarded and not putting and contexts.items + contexts.unknown != size(owner):
            contexts.forget(size(owner))
        item = get_item(owner)
        if putting or emptying == get_ident():
            contexts.drop(item)
        else:
            contexts.match(item)
        if evictions is not None:
            evictions.got(item)
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
    from inspect import signature  # imported here: see hook

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
        entry = contexts.add(item, 0)  # before the put: a consumer may have the item before `put` returns
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


def _getting(
    target: Any, name: str, contexts: Contexts, putting: set[int], getting: set[int]
) -> Callable[..., Any]:
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
    """Return a proxy of an object that cannot be hooked, a `SimpleQueue`; it forwards everything else."""

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

    own = [
        name
        for name in dir(type(target))
        if name[:2] == "__" == name[-2:] and not hasattr(Proxy, name) and name != "__slots__"
    ]
    for name in ("__repr__", "__str__", "__dir__", "__reduce_ex__", *own):
        setattr(Proxy, name, forwarding(name))
    for name, function in hooks.items():
        setattr(Proxy, name, staticmethod(function))
    setattr(Proxy, HOOKED, contexts)
    _leave_unmarked(target)
    return Proxy()
