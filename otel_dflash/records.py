"""The wire: the layout of 64-byte records and of ring files.

A ring file is one worker's memory, shared with the agent (little endian, 8-byte words)::

    byte 0         header      64 words: identity, the reader's tail, cumulative counters
    byte 512       live block  1 word per name id: start of the phase's newest entry, ns; 0: no record of it
    byte 8704      recorded    1 word per name id, the reader's: start of the newest entry it has recorded
    byte 16896     names       append only: u16 length, u8 kind, UTF-8 text; counted in the header
    byte 65536     slots       64 bytes each, to the end of the file

A slot is eight words; word 0 is stored last and publishes the other seven::

    word 0   lap:24 | kind:8 | name:16 | error:16        lap = 1 + sequence // slots, modulo 2**24, never 0
    PHASE      1 start     2 end        3 step id                     name = phase, error = error type
    STEP       1 start     2 end        3 step id   4 tokens     5 loss tokens
               6 step number + 1 : 48 | bucket : 16   7 root, 0 = itself  name = thread, error = error type
    ATTRIBUTE  1 time      2 value type 3 step id   4 value           name = key
    CONSUMED   1 get time  2 put time   3 step id   4 root       5 producing step   6 bucket
                                                                      name = queue, error = 1: fixed the root
    RESUMED    1 time      2 put time   3 step id   4 root       5 resumed step
    CANCELLED  1 time                   3 step id                     no step after all: its phases have none

Times are CLOCK_MONOTONIC in ns, except put times: they cross hosts, so they are wall time by the session's
anchor. A step id is ``ring id + serial``, serial from 1; a record with step id ``ring id`` belongs to no
step. Zero in a name field means none.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

WORD_BYTES: Final = 8
RECORD_BYTES: Final = 64
RECORD_WORDS: Final = RECORD_BYTES // WORD_BYTES

# Word 0 of a slot.
LAP_SHIFT: Final = 40
LAP_MASK: Final = (1 << 24) - 1
LAP: Final = 1 << LAP_SHIFT  # what each lap adds to word 0 ...
LAST_LAP: Final = LAP_MASK << LAP_SHIFT  # ... up to this
KIND_SHIFT: Final = 32
KIND_MASK: Final = 0xFF
NAME_SHIFT: Final = 16
NAME_MASK: Final = 0xFFFF
ERROR_MASK: Final = 0xFFFF

# Word 6 of a STEP.
BUCKET_MASK: Final = 0xFFFF
NUMBER_SHIFT: Final = 16
NUMBER_MAX: Final = (1 << 48) - 2  # the largest step number

# A ring id is a 36-bit hash shifted left: the low bits count the steps (31 days at 100 steps/s).
SERIAL_BITS: Final = 28
SERIAL_MASK: Final = (1 << SERIAL_BITS) - 1

UNSET: Final = 1 << 63  # tokens not set; the smallest signed word


class Kind(IntEnum):
    """What a record is (bits 32..39 of word 0)."""

    PHASE = 1
    STEP = 2
    ATTRIBUTE = 3
    CONSUMED = 4
    RESUMED = 5
    CANCELLED = 6


class ValueType(IntEnum):
    """How word 4 of an ATTRIBUTE is read: two's complement, IEEE double, name id, 0 or 1."""

    INT = 0
    FLOAT = 1
    TEXT = 2
    BOOL = 3


# The file.
MAGIC: Final = 0x31_68_73_61_6C_66_64_6F  # "odflash1" read as a little-endian word: also the format version
HEADER_BYTES: Final = 512
LIVE_OFFSET: Final = HEADER_BYTES
NAMES_MAX: Final = 1024
RECORDED_OFFSET: Final = LIVE_OFFSET + NAMES_MAX * WORD_BYTES
NAMES_OFFSET: Final = RECORDED_OFFSET + NAMES_MAX * WORD_BYTES
SLOTS_OFFSET: Final = 65536
NAME_TEXT_BYTES_MAX: Final = 128  # a longer name is cut; descriptors (worker, queue, thread) may take 1 KiB
DESCRIPTOR_BYTES_MAX: Final = 1024


class Header(IntEnum):
    """Word indices of the header. The writer owns all but TAIL, ATTACHED, RECORDED_STEP and RECORDED_END."""

    MAGIC = 0
    RING_ID = 1
    PID = 2
    PROCESS_START = 3  # clock ticks since boot, /proc/<pid>/stat field 22: tells a reused pid
    SLOTS = 4
    CREATED = 5  # monotonic ns
    CLOSED = 6  # monotonic ns; 0 while the worker is in use
    NAMES = 7  # published names
    TAIL = 8  # records the reader has written to the recording
    ATTACHED = 9  # 1 once a reader holds the file open
    STEP_ID = 10  # live: the newest step entered ...
    STEP_START = 11  # ... and its start; open while STEP_ID is later than the last recorded step
    RECORDED_STEP = 12  # the newest step id the reader has recorded the end of
    RECORD_COST = 13  # what one phase costs here, ps; measured at start()
    STEP_DROPPED = 14  # the newest step whose end, or cancellation, found no slot
    RECORDED_END = 15  # when the newest recorded step ended, monotonic ns
    COUNTERS = 16  # the first of the counters below


class Counter(IntEnum):
    """Cumulative counts of a ring, word ``Header.COUNTERS + value``; they stay true when records are
    dropped."""

    STEPS = 0  # steps ended
    TOKENS = 1  # tokens of those steps
    PUTS = 2  # contexts put
    GETS = 3  # contexts received
    DROPPED_RING_FULL = 4  # records that found no free slot
    DROPPED_WRONG_THREAD = 5  # phases and steps entered from another thread inside a step
    DROPPED_STALE = 6  # phases and steps left open by an interrupt
    DROPPED_VALUE = 7  # step.set() values that are not int, float, str or bool, or out of range
    DROPPED_NAME = 8  # names beyond their kind's share, recorded as OTHER_NAME
    UNMATCHED = 9  # queue items whose context is unknown
    OUTSIDE_STEP = 10  # puts outside a step: residence is known, the producer is not
    EVICTED = 11  # items that left a queue by no get: dropped by its own put, or taken out by hand


DROP_REASONS: Final = {
    Counter.DROPPED_RING_FULL: "ring_full",
    Counter.DROPPED_WRONG_THREAD: "wrong_thread",
    Counter.DROPPED_STALE: "stale",
    Counter.DROPPED_VALUE: "unsupported_value",
    Counter.DROPPED_NAME: "name_limit",
    Counter.UNMATCHED: "unmatched_item",
}


class NameKind(IntEnum):
    """The kinds of names in a ring's table."""

    WORKER = 1  # JSON: role, index, gpu; always name id 0
    TEXT = 2  # a key or error type
    PHASE = 3  # "<state> <name>"
    THREAD = 4  # JSON: id (native), name
    QUEUE = 5  # JSON: name, capacity, min_ready
    REFUSED = 6  # "<key> <type>": a step.set() value that was not read
    VALUE = 7  # a bucket or string value of step.set()
    OVERFLOWED = 8  # a key of step.set() that had more different strings than the table holds
    FILLED = 9  # a kind, in lower case, that had more names than its share holds


NAME_SHARES: Final = {
    NameKind.WORKER: (1, 1027),
    NameKind.TEXT: (128, 6144),
    NameKind.PHASE: (192, 8192),
    NameKind.THREAD: (128, 8192),
    NameKind.QUEUE: (32, 4096),
    NameKind.REFUSED: (32, 2048),
    NameKind.VALUE: (495, 17405),
    NameKind.OVERFLOWED: (8, 1024),
    NameKind.FILLED: (8, 512),
}
"""How many names of each kind a ring has room for, and how many bytes: three more than the text of each. They
sum to the table: what may differ from step to step (a thread, a string) takes no room of phases and keys."""

OTHER_NAME_ID: Final = 1  # stands for every name beyond the cap
OTHER_NAME: Final = "_OTHER"


class State(IntEnum):
    """What a worker's wall time was spent on.

    Phases have the states before OTHER, which is time in no phase. UNCAPTURED is such time while phases were
    not captured (`otel-dflash detail`).
    """

    BUSY = 0
    STARVED = 1
    BACKPRESSURED = 2
    LOCK_WAIT = 3
    OTHER = 4
    UNCAPTURED = 5


# A context: what crosses a queue, a process or a node, one opaque int of 24 bytes.
CONTEXT_ROOT_SHIFT: Final = 128
CONTEXT_STEP_SHIFT: Final = 64
WORD_MASK: Final = (1 << 64) - 1
RESIDENCE_NS_MAX: Final = (
    1 << 53
)  # 104 days; a put time further from the get is none: a word is missing or misplaced
