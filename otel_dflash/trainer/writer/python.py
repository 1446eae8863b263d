"""The hot path: one worker's records into its ring. Pure Python; a native writer replaces this file alone.

`bind` makes closures over one ring: a local cell is the cheapest state that Python has, and the views are
strided so that word k of slot n is ``wk[n]``.

Rule of atomicity, held by a test that disassembles this file: CPython may run a signal handler, a destructor
or another thread after any call, at a jump that is taken (3.10; later only backwards), and at a function's
entry, and at no other place. So from comparing the index to storing word 0 (``if i != limit`` .. ``w0[o] =``)
there is no call and no jump, and nothing that can raise: values are checked before. Whatever calls goes back
to the comparison. A slot taken and never published stalls the reader for ever.
"""

from __future__ import annotations

from _thread import get_ident
from array import array
from collections.abc import Callable
from threading import Thread, current_thread
from time import monotonic_ns as clock
from typing import Any

from otel_dflash.records import (
    CONTEXT_ROOT_SHIFT,
    CONTEXT_STEP_SHIFT,
    KIND_SHIFT,
    LAP,
    LAST_LAP,
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
)
from otel_dflash.ring import Ring, made_again
from otel_dflash.session import DETAIL_OFF, DETAIL_PHASES, count_unrecorded_step
from otel_dflash.trainer.values import VALUE, as_context, describe_thread, encode, error_id, label, natural
from otel_dflash.trainer.writer.overlap import beside, without
from otel_dflash.trainer.writer.protocol import Enter, Exit, OpenStep, Writer

_STEPS, _TOKENS, _PUTS, _GETS, _FULL, *_ = (Header.COUNTERS + counter for counter in Counter)
_STEP_ID, _STEP_START, _STEP_DROPPED, _TAIL = (
    int(word) for word in (Header.STEP_ID, Header.STEP_START, Header.STEP_DROPPED, Header.TAIL)
)
_PHASE, _STEP, _ATTRIBUTE, _CONSUMED, _RESUMED, _CANCELLED = (kind << KIND_SHIFT for kind in Kind)


def bind(
    make_ring: Callable[[], Ring],
    control: memoryview,
    wall_offset_ns: int,
    step: Any,
    current: dict[int, OpenStep | None],
    pending: dict[int, list[Any]],
) -> Writer:
    """Make the closures of one worker over a ring of its own, as protocol.Bind says."""
    ring = make_ring()
    writer = Writer()
    scratch = memoryview(array("Q", [0]) * NAMES_MAX)  # where words go that no reader sees
    header = live = w0 = w1 = w2 = w3 = w4 = w5 = w6 = w7 = scratch
    capacity = limit = i = base = lap = full = puts = gets = steps = total_tokens = 0

    owner = 0  # thread whose phases are captured now; 0: none, look closer
    step_owner = 0  # thread that is inside the step; 0: no step is open
    muted = 0  # thread inside a step that began with capture off
    orphaned = closed = ringless = False
    step_id = root = origin = resuming = handed_on = 0  # the last: the newest step that produced a context
    boundary = 0  # start of the open step, else end of the last: a phase open since before is stale
    step_tokens = step_loss_tokens = UNSET
    step_bucket = step_number = thread_name = cancel_start = cancel_end = 0
    bucket_value: str | int | None = None
    thread: Thread = current_thread()  # whose step it is
    named: Thread | None = None  # whose name thread_name is
    starts: dict[str, list[Callable[[], int]]] = {}  # of the phases of each state, 0 where not open

    def attach(new: Ring) -> None:
        """Write into a ring from here on. No call: nobody sees half of it."""
        nonlocal ring, header, live, w0, w1, w2, w3, w4, w5, w6, w7, capacity, limit, i, base, lap
        nonlocal step_id, full, puts, gets, steps, total_tokens, orphaned, named
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
        nonlocal header, live, w0, w1, w2, w3, w4, w5, w6, w7, capacity, limit, i, base
        nonlocal owner, step_owner, muted, orphaned
        header = live = w0 = w1 = w2 = w3 = w4 = w5 = w6 = w7 = scratch
        capacity = limit = NAMES_MAX
        i = base = owner = step_owner = muted = 0
        orphaned = True

    def revive() -> bool:
        """After a fork: give this process a ring of its own. Tried once."""
        nonlocal closed, ringless
        new = None if closed else made_again(make_ring, ring)
        if new is not None:
            attach(new)
        elif not closed:
            closed = ringless = True
        return not closed

    def close() -> None:
        nonlocal closed, ringless
        closed, ringless = True, False
        orphan()  # no record follows the word that says so
        ring.close()

    def slow() -> bool:
        """Make room at the index. True: none, the record is dropped and counted. No call, no loop."""
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

    def put(word: int, a1: int, a2: int, a3: int, a4: int = 0, a5: int = 0, a6: int = 0, a7: int = 0) -> bool:
        """Publish any record but a plain phase. True: it is dropped."""
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
                return False
            if slow():
                return True

    def make_phase(name: str, state: str) -> tuple[Enter, Exit]:
        if orphaned:
            revive()
        k = ring.intern(NameKind.PHASE, f"{state} {name}")
        word = _PHASE + (k << NAME_SHIFT)
        t0 = loose_owner = 0  # its start; thread that entered it outside a step
        enclosing: list[int] = []  # starts of the same phase around this one
        refused: dict[int, int] = {}  # thread -> how often it entered while this was another thread's
        starts.setdefault(state, []).append(lambda: t0)

        def phase_enter() -> None:
            nonlocal t0
            if t0 or owner != get_ident():
                return odd_enter()
            t0 = live[k] = clock()
            return None

        def phase_exit(error: Any = None, value: Any = None, traceback: Any = None) -> None:
            nonlocal i, t0
            t1 = clock()
            if error is not None or not t0 or enclosing or owner != get_ident():
                return odd_exit(t1, error)
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
                    t0 = live[k] = 0
                    return None

        def odd_enter() -> None:
            """Sort out the rest: outside a step, another thread, capture off, left open, entered twice."""
            nonlocal t0, loose_owner
            me = get_ident()
            if step_owner:
                if step_owner != me:
                    refused[me] = refused.get(me, 0) + 1
                    return ring.count(Counter.DROPPED_WRONG_THREAD)
                if owner != me:
                    return None
            elif (orphaned and not revive()) or muted == me or control[0] != DETAIL_PHASES:
                return None
            if t0 and t0 < boundary:
                ring.count(Counter.DROPPED_STALE)
                enclosing.clear()
            elif t0 and not step_owner and loose_owner != me:
                refused[me] = refused.get(me, 0) + 1
                return ring.count(Counter.DROPPED_WRONG_THREAD)
            elif t0:
                enclosing.append(t0)
            loose_owner = me
            t0 = live[k] = clock()
            return None

        def odd_exit(t1: int, error: Any) -> None:
            """End the phase, also from another thread, unless that one was refused when it entered."""
            nonlocal t0
            me = get_ident()
            is_own = cancel_start <= t0 < cancel_end or (owner if step_owner else loose_owner) == me
            if refused.get(me):
                refused[me] -= 1
            elif t0 and (is_own or t0 >= boundary):
                start, t0 = t0, enclosing.pop() if enclosing else 0
                if put(word + error_id(ring, error), start, t1, step_id if step_owner else ring.id):
                    live[k] = 0

        return phase_enter, phase_exit

    def step_enter() -> Any:
        nonlocal step_id, boundary, step_owner, owner, muted, root, origin, resuming, thread
        nonlocal named, thread_name, step_tokens, step_loss_tokens, step_bucket, step_number, bucket_value
        me, who = get_ident(), current_thread()
        before = current.get(me)
        detail = control[0]
        captured = me if detail == DETAIL_PHASES else 0
        t0 = clock()
        while True:
            # Neither call nor jump from here to the break: of two threads at once one is late, and a handler
            # that comes after it finds a whole step.
            if not step_owner and not orphaned:
                step_owner = me
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
        current[me] = writer if before is None else beside(before, writer)
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
            if not revive() and ringless and control[0] != DETAIL_OFF:
                count_unrecorded_step(control)
            return not closed
        whose = thread
        if step_owner != me and whose.is_alive():
            ring.count(Counter.DROPPED_WRONG_THREAD)
            return False
        # left open by an interrupt, and nobody else's: the agent cuts it off
        if step_owner and thread is whose:
            owner = step_owner = 0
            ring.count(Counter.DROPPED_STALE)
        return True

    def step_exit(error: Any = None, value: Any = None, traceback: Any = None) -> None:
        nonlocal boundary, step_owner, owner, muted, steps, total_tokens
        me = get_ident()
        if step_owner != me:  # another thread's, or closed in it, or capture was off when it began
            current[me] = without(current.get(me), writer)
            if muted == me:
                muted = 0
                pending.pop(me, None)  # what it got is not captured either
            return
        word = _STEP + thread_name + error_id(ring, error)
        labels = step_bucket + (step_number << NUMBER_SHIFT)
        t1 = clock()
        up = 0 if root == origin else root
        if put(word, boundary, t1, step_id, step_tokens, step_loss_tokens, labels, up):
            header[_STEP_DROPPED] = step_id
        owner = step_owner = 0
        boundary = t1
        current[me] = None if current.get(me) is writer else without(current.get(me), writer)
        header[_STEPS] = steps = steps + 1
        if step_tokens != UNSET:
            header[_TOKENS] = total_tokens = total_tokens + step_tokens & WORD_MASK

    def step_cancel() -> None:
        nonlocal boundary, step_owner, owner, cancel_start, cancel_end
        me = get_ident()
        if step_owner != me or handed_on == step_id:  # not open here, or a consumer's link names it
            step_exit()
            return
        t1 = clock()
        if put(_CANCELLED, t1, 0, step_id):
            header[_STEP_DROPPED] = step_id
        cancel_start = boundary
        owner = step_owner = 0
        boundary = cancel_end = t1
        current[me] = without(current.get(me), writer)

    def set_values(
        *, tokens: Any = None, loss_tokens: Any = None, bucket: Any = None, step: Any = None, **others: Any
    ) -> None:
        nonlocal step_tokens, step_loss_tokens, step_bucket, step_number, bucket_value
        if step_owner != get_ident():
            if step_owner:
                ring.count(Counter.DROPPED_WRONG_THREAD)
            return
        if tokens is not None:
            step_tokens = natural(ring, "tokens", tokens, step_tokens)
        if loss_tokens is not None:
            step_loss_tokens = natural(ring, "loss_tokens", loss_tokens, step_loss_tokens)
        if step is not None:
            step_number = natural(ring, "step", step, step_number - 1, NUMBER_MAX) + 1
        if bucket is not None and (kept := label(ring, "bucket", bucket)):
            bucket_value, step_bucket = kept
        for key, value in others.items():
            if encoded := encode(ring, key, value):
                put(_ATTRIBUTE + encoded[0], clock(), encoded[1], step_id, encoded[2])

    def produced(count: int = 1) -> int:
        nonlocal root, puts, handed_on
        me = get_ident()
        if step_owner != me:
            if count and not step_owner and not orphaned and muted != me:
                ring.count(Counter.OUTSIDE_STEP)
            return 0
        t = clock() + wall_offset_ns
        if count:
            root, handed_on = root or origin, step_id
            header[_PUTS] = puts = puts + 1
        return (root or origin) << CONTEXT_ROOT_SHIFT | origin << CONTEXT_STEP_SHIFT | t

    def consumed(context: int) -> None:
        # 0 is what produced() returns while nothing is captured
        if step_owner == get_ident() and (context := as_context(ring, context, clock() + wall_offset_ns)):
            take(0, 0, clock(), context)

    def received(queue_text: str, t: int, context: int, bucket_text: str | None) -> None:
        """Take an item's context off a wrapped queue; the thread is inside this worker's step."""
        if step_owner == get_ident():
            of = ring.intern(VALUE, bucket_text) if bucket_text is not None else 0
            take(ring.intern(NameKind.QUEUE, queue_text), of, t, context)

    def take(queue_id: int, of_bucket: int, t: int, context: int) -> None:
        nonlocal root, gets
        source = context >> CONTEXT_STEP_SHIFT & WORD_MASK
        fixes_root = 0
        if root == 0 and source:
            root = context >> CONTEXT_ROOT_SHIFT
            fixes_root = 1
        header[_GETS] = gets = gets + 1
        word = _CONSUMED + (queue_id << NAME_SHIFT) + fixes_root
        put(word, t, context & WORD_MASK, step_id, context >> CONTEXT_ROOT_SHIFT, source, of_bucket)

    def resume(context: int) -> None:
        nonlocal resuming
        resuming = as_context(ring, context, clock() + wall_offset_ns)

    def take_over(t: int) -> None:
        nonlocal resuming, root, origin
        context, resuming = resuming, 0
        source = context >> CONTEXT_STEP_SHIFT & WORD_MASK
        if source:
            root = context >> CONTEXT_ROOT_SHIFT
            origin = source
            put(_RESUMED, t, context & WORD_MASK, step_id, root, origin)

    attach(ring)
    closures: list[Any] = [make_phase, step_enter, step_exit, step_cancel, set_values, produced, consumed]
    for closure in [*closures, received, resume, close, orphan]:
        setattr(writer, closure.__name__, closure)
    writer.step_id = lambda: step_id if step_owner else 0
    writer.bucket = lambda: bucket_value
    writer.is_in = lambda state: any(start() >= boundary for start in starts.get(state, ()))
    writer.ring = lambda: ring
    return writer
