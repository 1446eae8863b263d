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
from threading import Thread, current_thread
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
    NUMBER_MAX,
    NUMBER_SHIFT,
    UNSET,
    WORD_MASK,
    Counter,
    Header,
    Kind,
    NameKind,
    ValueType,
)
from otel_dflash.ring import Ring
from otel_dflash.session import DETAIL_OFF, DETAIL_PHASES
from otel_dflash.trainer.values import CONTEXT_MAX, NATURAL_MAX, describe_thread, encode, error_id, natural, refuse
from otel_dflash.trainer.worker import Enter, Exit, Writer

LAP: Final = 1 << LAP_SHIFT
LAST_LAP: Final = LAP_MASK << LAP_SHIFT

_STEPS, _TOKENS, _PUTS, _GETS, _FULL = (
    Header.COUNTERS + c for c in (Counter.STEPS, Counter.TOKENS, Counter.PUTS, Counter.GETS, Counter.DROPPED_RING_FULL)
)
_STEP_ID, _STEP_START, _TAIL = int(Header.STEP_ID), int(Header.STEP_START), int(Header.TAIL)
_TEXT, _VALUE = int(NameKind.TEXT), int(NameKind.VALUE)
_PHASE, _STEP, _ATTRIBUTE, _CONSUMED, _RESUMED = (kind << KIND_SHIFT for kind in Kind)


def bind(
    make_ring: Callable[[], Ring],
    control: memoryview,
    wall_offset_ns: int,
    step: Any,
    current: dict[int, Writer | None],
    pending: dict[int, list[Any]],
) -> Writer:
    """Make the closures of one worker over a ring of its own.

    Args:
        make_ring: Creates a ring for this process; called here, and again in a child after a fork.
        control: The session's control words; word 0 is the capture detail.
        wall_offset_ns: Anchored wall time minus monotonic time.
        step: What entering a step returns.
        current: Thread -> the writer whose step is open there.
        pending: Thread -> (Contexts, time, entry) after each other, received outside a step.

    Raises:
        OSError: `make_ring` cannot make the first ring.
    """
    ring = make_ring()
    writer = Writer()
    scratch = memoryview(array("Q", [0]) * NAMES_MAX)  # where words go that no reader sees
    header = live = w0 = w1 = w2 = w3 = w4 = w5 = w6 = w7 = scratch
    capacity = limit = i = base = lap = 0
    full = puts = gets = steps = total_tokens = 0

    owner = 0  # thread whose phases are captured now; 0: none, look closer
    step_owner = 0  # thread that is inside the step; 0: no step is open
    muted = 0  # thread inside a step that began with capture off
    orphaned = closed = False
    step_id = root = origin = resuming = 0
    boundary = 0  # start of the open step, else the end of the last: a phase that was open before and is entered now is stale
    step_tokens = step_loss_tokens = UNSET
    step_bucket = step_number = thread_name = 0
    bucket_value: str | int | None = None
    thread: Thread = current_thread()  # whose step it is
    named: Thread | None = None  # whose name thread_name is
    outer: Writer | None = None

    def attach(new: Ring) -> None:
        """Write into a ring from here on. No call: nobody sees half of it."""
        nonlocal ring, header, live, w0, w1, w2, w3, w4, w5, w6, w7
        nonlocal capacity, limit, i, base, lap, step_id, full, puts, gets, steps, total_tokens, orphaned, named
        ring = new
        header = new.words
        live = new.live
        w0, w1, w2, w3, w4, w5, w6, w7 = new.columns
        capacity = limit = new.slots
        i = base = full = puts = gets = steps = total_tokens = 0
        lap = LAP
        step_id = new.id
        named = None
        orphaned = False

    def orphan() -> None:
        """Let go of the ring at once: it is the parent's of this forked process, or it is closed."""
        nonlocal header, live, w0, w1, w2, w3, w4, w5, w6, w7, capacity, limit, i, base, owner, step_owner, muted, orphaned
        header = live = w0 = w1 = w2 = w3 = w4 = w5 = w6 = w7 = scratch
        capacity = limit = NAMES_MAX
        i = base = owner = step_owner = muted = 0
        orphaned = True

    def revive() -> bool:
        """After a fork: give this process a ring of its own, with the same names under the same ids. Tried once."""
        nonlocal closed
        if not closed:
            try:
                new = make_ring()
            except OSError:
                closed = True
            else:
                for kind, text in ring.names()[2:]:
                    new.intern(kind, text)
                attach(new)
        return not closed

    def close() -> None:
        nonlocal closed
        closed = True
        orphan()  # no record follows the word that says so
        ring.close()

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

    def make_phase(name: str, state: str) -> tuple[Enter, Exit]:
        if orphaned:
            revive()
        k = ring.intern(NameKind.PHASE, f"{state} {name}")
        word = _PHASE + (k << NAME_SHIFT)
        t0 = loose_owner = 0  # its start; thread that entered it outside a step
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
            nonlocal t0, loose_owner
            me = get_ident()
            if step_owner:
                if step_owner != me:
                    return ring.count(Counter.DROPPED_WRONG_THREAD)
                if owner != me:
                    return None
            elif (orphaned and not revive()) or muted == me or control[0] != DETAIL_PHASES:
                return None
            if t0 and t0 < boundary:
                ring.count(Counter.DROPPED_STALE)
                enclosing.clear()
            elif t0 and not step_owner and loose_owner != me:
                return ring.count(Counter.DROPPED_WRONG_THREAD)
            elif t0:
                enclosing.append(t0)
            loose_owner = me
            t0 = live[k] = clock()
            return None

        def odd_exit(t1: int, kind: type[BaseException] | None) -> None:
            nonlocal t0
            if t0 and (owner if step_owner else loose_owner) == get_ident():
                start = t0
                t0 = enclosing.pop() if enclosing else 0
                put(word + error_id(ring, kind), start, t1, step_id if step_owner else ring.id)

        return phase_enter, phase_exit

    def step_enter() -> Any:
        nonlocal step_id, boundary, step_owner, owner, muted, outer, root, origin, resuming, thread, named, thread_name
        nonlocal step_tokens, step_loss_tokens, step_bucket, step_number, bucket_value
        me = get_ident()
        who = current_thread()
        before = current.get(me)
        detail = control[0]
        captured = me if detail == DETAIL_PHASES else 0
        t0 = clock()
        while True:
            if not step_owner and not orphaned:  # neither call nor jump from here to the break: of two threads at once, one is late,
                step_owner = me  # and a handler that comes after it finds a whole step
                owner = captured
                thread = who
                step_id = step_id + 1
                boundary = t0
                break
            if not ready(me):
                return step
        if detail == DETAIL_OFF:
            step_owner = 0
            muted = me
            resuming = 0
            return step
        header[_STEP_START] = t0
        header[_STEP_ID] = origin = step_id
        root = step_bucket = step_number = muted = 0
        step_tokens = step_loss_tokens = UNSET
        bucket_value = None
        if before is not writer:  # else the step before was left open
            outer = before
        current[me] = writer
        if who is not named:
            thread_name = ring.intern(NameKind.THREAD, describe_thread(who)) << NAME_SHIFT
            named = who
        if resuming:
            take_over(t0)
        if pending:
            waiting = iter(pending.pop(me, ()))
            for contexts, t, entry in zip(waiting, waiting, waiting, strict=True):
                contexts.deliver_to(writer, t, entry)
        return step

    def ready(me: int) -> bool:
        """Return whether a step may begin although one is open or the ring is gone."""
        nonlocal step_owner, owner
        if orphaned:
            return revive()
        whose = thread
        if step_owner != me and whose.is_alive():
            ring.count(Counter.DROPPED_WRONG_THREAD)
            return False
        if step_owner and thread is whose:  # left open by an interrupt, and nobody else's by now: the agent cuts it off
            owner = step_owner = 0
            ring.count(Counter.DROPPED_STALE)
        return True

    def step_exit(kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        nonlocal boundary, step_owner, owner, muted, steps, total_tokens
        me = get_ident()
        if step_owner != me:  # another thread's, or capture was off when it began
            if muted == me:
                muted = 0
            return
        word = _STEP + thread_name + error_id(ring, kind)
        labels = step_bucket + (step_number << NUMBER_SHIFT)
        t1 = clock()
        put(word, boundary, t1, step_id, step_tokens, step_loss_tokens, labels, 0 if root == origin else root)
        owner = step_owner = 0
        boundary = t1
        current[me] = outer
        steps = steps + 1
        header[_STEPS] = steps
        if step_tokens != UNSET:
            total_tokens = total_tokens + step_tokens & WORD_MASK
            header[_TOKENS] = total_tokens

    def set_values(*, tokens: Any = None, loss_tokens: Any = None, bucket: Any = None, step: Any = None, **others: Any) -> None:
        nonlocal step_tokens, step_loss_tokens, step_bucket, step_number, bucket_value
        if step_owner != get_ident():
            if step_owner:
                ring.count(Counter.DROPPED_WRONG_THREAD)
            return
        if tokens is not None:
            step_tokens = natural(ring, "tokens", tokens, NATURAL_MAX, step_tokens)
        if loss_tokens is not None:
            step_loss_tokens = natural(ring, "loss_tokens", loss_tokens, NATURAL_MAX, step_loss_tokens)
        if step is not None:
            step_number = natural(ring, "step", step, NUMBER_MAX, step_number - 1) + 1
        if bucket is not None:
            if type(bucket) is str or (type(bucket) is int and encode(bucket)):
                bucket_value = bucket
                step_bucket = ring.intern(_VALUE, f"{bucket}")
            else:
                refuse(ring, "bucket", bucket)
        for key, value in others.items():
            word = (ValueType.TEXT, ring.intern(_VALUE, value)) if type(value) is str else encode(value)
            if word is None:
                refuse(ring, key, value)
            else:
                put(_ATTRIBUTE + (ring.intern(_TEXT, key) << NAME_SHIFT), clock(), word[0], step_id, word[1])

    def produced() -> int:
        nonlocal root, puts
        me = get_ident()
        if step_owner != me:
            if not step_owner and not orphaned and muted != me:
                ring.count(Counter.OUTSIDE_STEP)
            return 0
        t = clock() + wall_offset_ns
        root = root or origin
        puts = puts + 1
        header[_PUTS] = puts
        return root << CONTEXT_ROOT_SHIFT | origin << CONTEXT_STEP_SHIFT | t

    def consumed(context: int) -> None:
        if step_owner == get_ident():
            context = natural(ring, "context", context, CONTEXT_MAX, 0)
            if context:  # 0 is what produced() returns while nothing is captured
                take(0, 0, clock(), context)

    def received(queue_text: str, t: int, context: int, bucket_text: str | None) -> None:
        """Take an item's context off a wrapped queue; the thread is inside this worker's step."""
        if step_owner == get_ident():
            of = ring.intern(_VALUE, bucket_text) if bucket_text is not None else 0
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
        resuming = natural(ring, "context", context, CONTEXT_MAX, 0)

    def take_over(t: int) -> None:
        nonlocal resuming, root, origin
        context = resuming
        resuming = 0
        source = context >> CONTEXT_STEP_SHIFT & WORD_MASK
        if source:
            root = context >> CONTEXT_ROOT_SHIFT
            origin = source
            put(_RESUMED, t, context & WORD_MASK, step_id, root, origin)

    attach(ring)
    for closure in (make_phase, step_enter, step_exit, set_values, produced, consumed, received, resume, close, orphan):
        setattr(writer, closure.__name__, closure)
    writer.step_id = lambda: step_id if step_owner else 0
    writer.bucket = lambda: bucket_value
    writer.ring = lambda: ring
    return writer
