"""The hot path: one worker's records into its ring. Pure Python; a native writer replaces this file alone.

`bind` makes closures over one ring: a local cell is the cheapest state that Python has, and the views are strided so that word k of
slot n is ``wk[n]`` (methods and attributes cost 1.3 x, struct.pack_into 1.6 x of a phase).

Rule of atomicity, held by a test that disassembles this file: CPython may run a signal handler, a destructor or another thread
after any call, at a jump that is taken (3.10; later only backwards), and at a function's entry, and at no other place. So from
comparing the index to storing word 0 (``if i != limit`` .. ``w0[o] =``) there is no call and no jump, and nothing that can raise:
values are checked before. Whatever calls goes back to the comparison. (``while i == limit: ...`` before the slot would leave the
loop by a taken jump: on 3.10 a handler could fill the ring right there.) A slot taken and never published stalls the reader for ever.
"""

from __future__ import annotations

from _thread import get_ident
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from threading import current_thread
from time import monotonic_ns as clock
from types import TracebackType
from typing import Any, Final

from otel_dflash.records import (
    CONTEXT_ROOT_SHIFT,
    CONTEXT_STEP_SHIFT,
    KIND_SHIFT,
    LAP_MASK,
    LAP_SHIFT,
    NAME_SHIFT,
    NAMES_MAX,
    NUMBER_SHIFT,
    OTHER_NAME_ID,
    RECORD_WORDS,
    SLOTS_OFFSET,
    UNSET,
    WORD_BYTES,
    WORD_MASK,
    Counter,
    Header,
    Kind,
    NameKind,
    ValueType,
)
from otel_dflash.ring import Ring
from otel_dflash.session import DETAIL_OFF, DETAIL_PHASES
from otel_dflash.trainer.values import describe_thread, encode, error_type, is_context, is_natural, type_name

Enter = Callable[[], Any]
Exit = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]

LAP: Final = 1 << LAP_SHIFT
LAST_LAP: Final = LAP_MASK << LAP_SHIFT
NUMBER_MASK: Final = (1 << 48) - 1

_COUNTERS: Final = int(Header.COUNTERS)
_STEPS, _TOKENS, _PUTS, _GETS, _FULL = (
    _COUNTERS + c for c in (Counter.STEPS, Counter.TOKENS, Counter.PUTS, Counter.GETS, Counter.DROPPED_RING_FULL)
)
_STEP_ID, _STEP_START, _TAIL = int(Header.STEP_ID), int(Header.STEP_START), int(Header.TAIL)
_PHASE, _STEP, _ATTRIBUTE, _CONSUMED, _RESUMED = (kind << KIND_SHIFT for kind in Kind)


@dataclass(eq=False)
class Writer:
    """The closures of one worker."""

    make_phase: Callable[[str, str], tuple[Enter, Exit]]
    step_enter: Enter
    step_exit: Exit
    set_values: Callable[..., None]
    produced: Callable[[], int]
    consumed: Callable[[int], None]
    received: Callable[[str, int, int, str | None], None]
    resume: Callable[[int], None]
    step_id: Callable[[], int]
    bucket: Callable[[], str | int | None]
    count: Callable[[Counter], None]
    must_wait: Callable[[], bool]
    close: Callable[[], None]
    orphan: Callable[[], None]


def bind(
    make_ring: Callable[[], Ring | None],
    control: memoryview,
    wall_offset_ns: int,
    step: Any,
    current: dict[int, Writer | None],
    pending: dict[int, list[Any]],
) -> Writer:
    """Make the closures of one worker over a ring of its own.

    Args:
        make_ring: Creates a ring for this process, None when it cannot; called here, and again in a child after a fork.
        control: The session's control words; word 0 is the capture detail.
        wall_offset_ns: Anchored wall time minus monotonic time.
        step: What entering a step returns.
        current: Thread -> the writer whose step is open there.
        pending: Thread -> (Contexts, time, entry) after each other, received outside a step.

    Raises:
        OSError: The first ring cannot be had.
    """
    first = make_ring()
    if first is None:
        raise OSError("no room for a ring")
    ring: Ring = first
    scratch = memoryview(array("Q", bytes(NAMES_MAX * WORD_BYTES)))  # where words go that no reader sees
    capacity = i = limit = base = lap = 0
    header = live = w0 = w1 = w2 = w3 = w4 = w5 = w6 = w7 = scratch
    full = puts = gets = steps = total_tokens = 0

    owner = 0  # thread whose phases are captured now; 0: none, look closer
    step_owner = 0  # thread that is inside the step; 0: no step is open
    orphaned = closed = False
    step_id = step_t0 = root = origin = resuming = 0
    step_tokens = step_loss_tokens = UNSET
    step_bucket = step_number = thread_name = 0
    bucket_value: str | int | None = None
    thread: Any = None
    outer: Writer | None = None
    loose_owner = loose_depth = 0  # phases outside a step

    def attach(new: Ring) -> None:
        nonlocal ring, header, live, w0, w1, w2, w3, w4, w5, w6, w7
        nonlocal capacity, i, limit, base, lap, step_id, full, puts, gets, steps, total_tokens, orphaned, thread
        ring = new
        start = SLOTS_OFFSET // WORD_BYTES
        header, live = ring.words, ring.live
        w0, w1, w2, w3, w4, w5, w6, w7 = (ring.words[start + k :: RECORD_WORDS] for k in range(RECORD_WORDS))
        limit = capacity = ring.slots
        i = base = full = puts = gets = steps = total_tokens = 0
        lap = LAP
        step_id = ring.id
        thread = None
        orphaned = False

    def slow() -> bool:
        """Make room at the index; True: there is none, the record is dropped and counted. No call, no loop, no branch while torn."""
        nonlocal i, limit, base, lap, full
        if i == capacity:
            i = 0
            base = base + capacity
            lap = lap % LAST_LAP + LAP
        limit = header[_TAIL] + capacity - base
        if limit > capacity:
            limit = capacity
        if i == limit:
            full = full + 1
            header[_FULL] = full
            return True
        return False

    def put(word: int, a1: int, a2: int, a3: int, a4: int = 0, a5: int = 0, a6: int = 0, a7: int = 0) -> None:
        """Publish any record but a plain phase."""
        nonlocal i
        while True:
            if i != limit:
                o = i
                i = o + 1
                w1[o] = a1
                w2[o] = a2
                w3[o] = a3
                w4[o] = a4
                w5[o] = a5
                w6[o] = a6
                w7[o] = a7
                w0[o] = lap + word
                return
            if slow():
                return

    def error_id(kind: type[BaseException]) -> int:
        """Return the name id of an error, 0 for an outcome that is no error."""
        try:
            text = error_type(kind)
            return 0 if text is None else ring.intern(NameKind.TEXT, text)
        except Exception:  # noqa: BLE001  a metaclass of the user's may raise anything; counted as a name beyond the table
            ring.count(Counter.DROPPED_NAME)
            return OTHER_NAME_ID

    def revive() -> bool:
        """After a fork: give this process a ring of its own, with the same names under the same ids."""
        if closed:
            return False
        new = make_ring()
        if new is None:
            return False
        for kind, text in ring.names()[2:]:
            new.intern(NameKind(kind), text)
        attach(new)
        return True

    def orphan() -> None:
        """Let go of the ring: it belongs to the parent of this forked process, or it is closed."""
        nonlocal header, live, owner, step_owner, loose_owner, loose_depth, orphaned
        header = live = scratch
        owner = step_owner = loose_owner = loose_depth = 0
        orphaned = True

    def close() -> None:
        nonlocal closed
        if not closed:
            closed = True
            if not orphaned:
                ring.close()
            orphan()

    def make_phase(name: str, state: str) -> tuple[Enter, Exit]:
        if orphaned:
            revive()
        k = ring.intern(NameKind.PHASE, f"{state} {name}")
        word = _PHASE + (k << NAME_SHIFT)
        t0 = 0
        enclosing: list[int] = []  # starts of the same phase around this one

        def phase_enter() -> None:
            nonlocal t0
            if t0 or owner != get_ident():
                return odd_enter()
            t0 = live[k] = clock()
            return None

        def phase_exit(kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
            nonlocal i, t0
            t1 = clock()
            if kind is not None or not t0 or enclosing or owner != get_ident():
                return odd_exit(t1, kind)
            while True:
                if i != limit:
                    o = i
                    i = o + 1
                    w1[o] = t0
                    w2[o] = t1
                    w3[o] = step_id
                    w0[o] = lap + word
                    t0 = 0
                    return None
                if slow():
                    t0 = 0
                    return None

        def odd_enter() -> None:
            """Sort out what the common case is not: outside a step, another thread, capture off, left open, entered twice."""
            nonlocal t0, loose_owner, loose_depth
            me = get_ident()
            if step_owner:
                if me != step_owner:
                    ring.count(Counter.DROPPED_WRONG_THREAD)
                    return
                if owner != me:
                    return
                if t0 and t0 < step_t0:
                    ring.count(Counter.DROPPED_STALE)
                    enclosing.clear()
                elif t0:
                    enclosing.append(t0)
            else:
                if orphaned and not revive():
                    return
                if control[0] != DETAIL_PHASES:
                    return
                if loose_depth and loose_owner != me:
                    ring.count(Counter.DROPPED_WRONG_THREAD)
                    return
                if t0 and not loose_depth:
                    ring.count(Counter.DROPPED_STALE)
                    enclosing.clear()
                elif t0:
                    enclosing.append(t0)
                loose_owner = me
                loose_depth += 1
            t0 = live[k] = clock()

        def odd_exit(t1: int, kind: type[BaseException] | None) -> None:
            nonlocal t0, loose_depth
            me = get_ident()
            if not t0 or (step_owner and owner != me) or (not step_owner and loose_owner != me):
                return
            if not step_owner:
                loose_depth -= 1
            start = t0
            t0 = enclosing.pop() if enclosing else 0
            put(word + (error_id(kind) if kind is not None else 0), start, t1, step_id if step_owner else ring.id)

        return phase_enter, phase_exit

    def step_enter() -> Any:
        nonlocal step_id, step_t0, step_owner, owner, outer, root, origin, resuming
        nonlocal step_tokens, step_loss_tokens, step_bucket, step_number, bucket_value
        me = get_ident()
        if (step_owner or orphaned) and not ready(me):
            return step
        detail = control[0]
        if detail == DETAIL_OFF:
            resuming = 0
            return step
        who = current_thread()
        if who is not thread:
            learn(who)
        outer = current.get(me)
        t0 = clock()
        step_id = step_id + 1
        header[_STEP_START] = t0
        header[_STEP_ID] = step_id
        step_t0 = t0
        root = 0
        origin = step_id
        step_tokens = step_loss_tokens = UNSET
        step_bucket = step_number = 0
        bucket_value = None
        step_owner = me
        owner = me if detail == DETAIL_PHASES else 0
        current[me] = writer
        if resuming:
            take_over(t0)
        if pending:
            collect(me)
        return step

    def ready(me: int) -> bool:
        """Return whether a step may begin although one is open or the ring is gone."""
        nonlocal step_owner, owner
        if orphaned:
            return revive()
        if step_owner != me and thread.is_alive():
            ring.count(Counter.DROPPED_WRONG_THREAD)
            return False
        ring.count(Counter.DROPPED_STALE)  # the step before was left open by an interrupt: the agent cuts it off
        owner = step_owner = 0
        return True

    def learn(who: Any) -> None:
        nonlocal thread, thread_name
        thread = who
        thread_name = ring.intern(NameKind.THREAD, describe_thread(who)) << NAME_SHIFT

    def step_exit(kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        nonlocal i, step_owner, owner, steps, total_tokens
        me = get_ident()
        if step_owner != me:
            return  # another thread's, or capture was off when it began
        word = _STEP + thread_name
        if kind is not None:
            word += error_id(kind)
        labels = step_bucket + (step_number << NUMBER_SHIFT)
        put(word, step_t0, clock(), step_id, step_tokens, step_loss_tokens, labels, 0 if root == origin else root)
        owner = step_owner = 0
        current[me] = outer
        steps = steps + 1
        header[_STEPS] = steps
        if step_tokens != UNSET:
            total_tokens = total_tokens + step_tokens
            header[_TOKENS] = total_tokens

    def set_values(tokens: Any = None, loss_tokens: Any = None, bucket: Any = None, step: Any = None, **others: Any) -> None:
        nonlocal step_tokens, step_loss_tokens, step_bucket, step_number, bucket_value
        if step_owner != get_ident():
            if step_owner:
                ring.count(Counter.DROPPED_WRONG_THREAD)
            return
        if tokens is not None:
            step_tokens = natural("tokens", tokens, UNSET)
        if loss_tokens is not None:
            step_loss_tokens = natural("loss_tokens", loss_tokens, UNSET)
        if step is not None:
            step_number = natural("step", step, -1) + 1 & NUMBER_MASK
        if bucket is not None:
            if type(bucket) is str or type(bucket) is int:
                bucket_value = bucket
                step_bucket = ring.intern(NameKind.TEXT, f"{bucket}")
            else:
                refuse("bucket", bucket)
        for key, value in others.items():
            word = (ValueType.TEXT, ring.intern(NameKind.TEXT, value)) if type(value) is str else encode(value)
            if word is None:
                refuse(key, value)
            else:
                put(_ATTRIBUTE + (ring.intern(NameKind.TEXT, key) << NAME_SHIFT), clock(), word[0], step_id, word[1])

    def natural(key: str, value: Any, refused: int) -> int:
        """Return a count that fits its word, `refused` for what is none (a tensor is not read, a numpy scalar neither)."""
        if is_natural(value):
            return value  # type: ignore[no-any-return]
        refuse(key, value)
        return refused

    def refuse(key: str, value: Any) -> None:
        """Count a value that must not be read, and let the agent say which."""
        ring.count(Counter.DROPPED_VALUE)
        ring.intern(NameKind.REFUSED, f"{key} {type_name(type(value))}")

    def produced() -> int:
        nonlocal root, puts
        if step_owner != get_ident():
            if step_owner == 0 and not orphaned:
                ring.count(Counter.OUTSIDE_STEP)
            return 0
        t = clock() + wall_offset_ns
        if root == 0:
            root = origin
        puts = puts + 1
        header[_PUTS] = puts
        return root << CONTEXT_ROOT_SHIFT | origin << CONTEXT_STEP_SHIFT | t

    def consumed(context: int) -> None:
        if step_owner != get_ident():
            return
        if not is_context(context):
            refuse("context", context)
        elif context:  # 0 is what produced() returns while nothing is captured
            take(0, 0, clock(), context)

    def received(queue_text: str, t: int, context: int, bucket_text: str | None) -> None:
        """Take an item's context off a wrapped queue; the thread is inside this worker's step."""
        of = ring.intern(NameKind.TEXT, bucket_text) if bucket_text is not None else 0
        take(ring.intern(NameKind.QUEUE, queue_text), of, t, context)

    def take(queue_id: int, of_bucket: int, t: int, context: int) -> None:
        nonlocal root, gets
        source = context >> CONTEXT_STEP_SHIFT & WORD_MASK
        fixes_root = 0
        if root == 0 and source:
            root = context >> CONTEXT_ROOT_SHIFT
            fixes_root = 1
        gets = gets + 1
        header[_GETS] = gets
        word = _CONSUMED + (queue_id << NAME_SHIFT) + fixes_root
        put(word, t, context & WORD_MASK, step_id, context >> CONTEXT_ROOT_SHIFT, source, of_bucket)

    def resume(context: int) -> None:
        nonlocal resuming
        resuming = context if is_context(context) else 0  # 0: an ordinary step

    def take_over(t: int) -> None:
        nonlocal resuming, root, origin
        context = resuming
        resuming = 0
        source = context >> CONTEXT_STEP_SHIFT & WORD_MASK
        if source:
            root = context >> CONTEXT_ROOT_SHIFT
            origin = source
            put(_RESUMED, t, context & WORD_MASK, step_id, root, origin)

    def collect(me: int) -> None:
        waiting = iter(pending.pop(me, ()))
        for contexts, t, entry in zip(waiting, waiting, waiting, strict=True):
            contexts.deliver_to(writer, t, entry)

    attach(ring)
    writer = Writer(
        make_phase,
        step_enter,
        step_exit,
        set_values,
        produced,
        consumed,
        received,
        resume,
        lambda: step_id if step_owner else 0,
        lambda: bucket_value,
        lambda counter: ring.count(counter),
        lambda: ring.must_wait_for_reader,
        close,
        orphan,
    )
    return writer
