"""A ring file: a worker creates it, the agent opens it.

records.py draws its layout; trainer/writer/python.py writes the records.

The file is reserved with posix_fallocate and touched before use: on a full tmpfs a store into a file that was
only truncated to size raises SIGBUS, which killed the process when tried. If the tmpfs is full the ring is a
memfd (its pages are not the tmpfs's), announced by a symbolic link to /proc/<pid>/fd/<n>, which needs no
block. Never a file on disk: a store stalls under writeback.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from _blake2 import blake2b  # hashlib would load OpenSSL
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from otel_dflash.records import (
    DESCRIPTOR_BYTES_MAX,
    LIVE_OFFSET,
    MAGIC,
    NAME_SHARES,
    NAME_TEXT_BYTES_MAX,
    NAMES_OFFSET,
    OTHER_NAME,
    OTHER_NAME_ID,
    RECORD_BYTES,
    RECORD_WORDS,
    RECORDED_OFFSET,
    SERIAL_BITS,
    SLOTS_OFFSET,
    WORD_BYTES,
    Counter,
    Header,
    NameKind,
)
from otel_dflash.session import process_start

# short-lived workers beside a stopped agent must not use up the machine's memory: 1 MiB each ...
WAITING_MAX: Final = 512
WAITING_MEMFDS_MAX: Final = 128  # ... nor the process's file descriptors
_PAGE: Final = 4096
# on 3.10 reading a member of an enum is a call
_COUNTERS, _NAMES, _FILLED = int(Header.COUNTERS), int(Header.NAMES), int(NameKind.FILLED)
# What was lost is counted already where these are given.
_REPORTS: Final = frozenset(map(int, (NameKind.REFUSED, NameKind.OVERFLOWED, NameKind.FILLED)))
_DESCRIPTORS: Final = frozenset(
    map(int, (NameKind.WORKER, NameKind.THREAD, NameKind.QUEUE, NameKind.REFUSED))
)
_KIND_NAMES: Final = {int(kind): kind.name.lower() for kind in NameKind}

# rings that nobody holds any more and the reader has not drained, with their memfd
_waiting: deque[tuple[Path, int | None]] = deque()


class Ring:
    """The writer's side of one ring: header, names, and the memory that the writer binds."""

    link: int | None = None
    """The memfd that dies with this process, if the ring is one."""
    path: Path | None = None
    """Where the reader finds it, until it has drained it."""

    def __init__(
        self, memory: mmap.mmap, number: int, role: str, index: int, gpu: int | None, place: str
    ) -> None:
        """Format memory of SLOTS_OFFSET bytes and any number of slots.

        `place` is the run and the node; the ring's id is a hash of it.
        """
        self.pid = pid = os.getpid()
        start = process_start(pid) or 0
        identity = f"{place} {pid} {start} {number}".encode()
        self.id = (
            int.from_bytes(blake2b(identity, digest_size=8).digest(), "little") >> SERIAL_BITS << SERIAL_BITS
        )
        self.memory = memory
        self.slots = (len(memory) - SLOTS_OFFSET) // RECORD_BYTES
        self.words = memoryview(memory).cast("Q")
        self.live = self.words[LIVE_OFFSET // WORD_BYTES : RECORDED_OFFSET // WORD_BYTES]
        # word k of each slot
        self.columns = [
            self.words[SLOTS_OFFSET // WORD_BYTES + k :: RECORD_WORDS] for k in range(RECORD_WORDS)
        ]
        self._names: dict[tuple[int, str], int] = {}
        self._names_end = NAMES_OFFSET
        # by kind; no kind is 0
        self._names_left = [0, *(NAME_SHARES[kind][0] for kind in NameKind)]
        self._bytes_left = [0, *(NAME_SHARES[kind][1] for kind in NameKind)]
        created = time.monotonic_ns()
        worker = {"role": role, "index": index, "gpu": gpu, "pid": pid, "created_ns": created}
        self.intern(NameKind.WORKER, json.dumps(worker))
        self.intern(NameKind.TEXT, OTHER_NAME)
        for word, value in (
            (Header.RING_ID, self.id),
            (Header.PID, pid),
            (Header.PROCESS_START, start),
            (Header.SLOTS, self.slots),
            (Header.CREATED, created),
            (Header.MAGIC, MAGIC),
        ):
            self.words[word] = value

    def intern(self, kind: int, text: str) -> int:
        """Return the id of a name, publishing it if it is new; OTHER_NAME_ID beyond the share of its kind.

        Any thread; never raises or blocks. No lock: a signal handler or a destructor may run while one is
        held. The rule of atomicity of trainer/writer/python.py holds here from looking for the key to
        counting the name.
        """
        if len(text) > NAME_TEXT_BYTES_MAX:
            text = text[: _text_bytes_max(kind)]
        kind = int(kind)  # the hash of an enum is a call
        key = (kind, text)
        known = self._names.get(key)
        if known is not None:
            return known
        if os.getpid() != self.pid:
            return OTHER_NAME_ID
        data = text.encode("utf-8", "replace")[: _text_bytes_max(kind)].decode("utf-8", "ignore").encode()
        entry = len(data).to_bytes(2, "little") + bytes((kind,)) + data
        size = len(entry)
        names_left, bytes_left = self._names_left, self._bytes_left
        words, names, memory = self.words, self._names, self.memory
        while True:
            start = self._names_end
            # made here: it is tracked by the collector, which may run a destructor
            place = slice(start, start + size)
            if key in names:
                return names[key]
            if not names_left[kind] or bytes_left[kind] < size:
                if kind not in _REPORTS:
                    self.count(Counter.DROPPED_NAME)
                    self.intern(_FILLED, _KIND_NAMES[kind])
                return OTHER_NAME_ID
            if key not in names and self._names_end == start:
                memory[place] = entry
                self._names_end = start + size
                names_left[kind] = names_left[kind] - 1
                bytes_left[kind] = bytes_left[kind] - size
                names[key] = name_id = words[_NAMES]
                words[_NAMES] = name_id + 1
                return name_id

    def names(self) -> list[tuple[int, str]]:
        """Return every name in the order of the ids."""
        return list(self._names)

    def count(self, counter: Counter, amount: int = 1) -> None:
        """Add to a counter. Any thread. Does nothing in a forked child: the ring is its parent's."""
        words = self.words
        word = _COUNTERS + counter
        if os.getpid() == self.pid:
            words[word] += amount

    def close(self) -> None:
        """Mark the ring as complete: the agent drains the rest and removes the file.

        Does nothing in a forked child.
        """
        if self.is_open:
            self.words[Header.CLOSED] = time.monotonic_ns()

    @property
    def is_open(self) -> bool:
        """Return whether the agent still reads what this process writes here."""
        return os.getpid() == self.pid and not self.words[Header.CLOSED]

    @property
    def must_wait_for_reader(self) -> bool:
        """Return whether the ring dies with this process unless a reader has opened it."""
        return self.link is not None and not self.words[Header.ATTACHED]

    def __del__(self) -> None:
        """Close the ring of a worker that nobody holds any more. A memfd stays open until a reader has it."""
        if hasattr(self, "columns"):
            self.close()
            if self.link is not None and (self.words[Header.ATTACHED] or os.getpid() != self.pid):
                os.close(self.link)
            elif self.path is not None and os.getpid() == self.pid:
                _waiting.append((self.path, self.link))


def _text_bytes_max(kind: int) -> int:
    return DESCRIPTOR_BYTES_MAX if kind in _DESCRIPTORS else NAME_TEXT_BYTES_MAX


def create_ring(
    directory: Path, number: int, size_bytes: int, role: str, index: int, gpu: int | None, place: str
) -> Ring:
    """Create and publish the ring file `ring-<pid>-<number>` of a session directory.

    Raises:
        OSError: Neither the tmpfs nor a memfd has room, or too many rings wait for an agent that does not
            drain them.
    """
    waiting, memfds = _count_waiting()
    if waiting >= WAITING_MAX or memfds >= WAITING_MEMFDS_MAX:
        raise OSError(
            f"{waiting} rings of workers that ended wait for the agent: it is stopped, gone, or far behind"
        )
    path = directory / f"ring-{os.getpid()}-{number}"
    draft = path.with_name(f".{path.name}")
    try:
        memory = _reserve_file(draft, size_bytes)
    except OSError:
        link = os.memfd_create("otel-dflash-ring", os.MFD_CLOEXEC)
        try:
            ring = Ring(_map(link, size_bytes), number, role, index, gpu, place)
            path.symlink_to(f"/proc/{os.getpid()}/fd/{link}")
        except OSError:
            os.close(link)
            raise
        ring.link = link
        ring.path = path
        return ring
    ring = Ring(memory, number, role, index, gpu, place)
    draft.rename(path)  # a reader never sees a half-made ring
    ring.path = path
    return ring


def made_again(make_ring: Callable[[], Ring], like: Ring) -> Ring | None:
    """Return a new ring with the names of another under the same ids, None if it cannot be created."""
    try:
        ring = make_ring()
    except OSError:
        return None
    for kind, text in like.names()[2:]:  # every ring has the first two
        ring.intern(kind, text)
    return ring


def _count_waiting() -> tuple[int, int]:
    """Close the memfds of drained rings; return how many rings still wait, and how many are memfds."""
    memfds = 0
    for _ in range(len(_waiting)):
        try:
            path, link = _waiting.popleft()
        except IndexError:  # another thread counts too
            break
        if os.path.lexists(path):
            _waiting.append((path, link))
            memfds += link is not None
        elif link is not None:
            os.close(link)
    return len(_waiting), memfds


def _reserve_file(path: Path, size_bytes: int) -> mmap.mmap:
    if not _is_tmpfs(path.parent):
        raise OSError(f"{path.parent} is not a tmpfs")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return _map(fd, size_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    os.posix_fallocate(fd, 0, size_bytes)
    memory = mmap.mmap(fd, size_bytes)
    for offset in range(0, size_bytes, _PAGE):
        memory[offset] = 0
    return memory


def _is_tmpfs(directory: Path) -> bool:
    """Return whether the directory is in memory, by the mount table."""
    return file_system(os.fsencode(directory.resolve()), Path("/proc/self/mounts").read_bytes()) == b"tmpfs"


def file_system(path: bytes, mounts: bytes) -> bytes:
    """Return the type of the file system of a path.

    Everything is bytes: the locale may not know the characters of a mount point.
    """
    best = (b"", b"")
    target = path + b"/"
    for line in mounts.split(b"\n"):
        _, mount, kind = [*line.split(b" "), b"", b"", b""][:3]
        for escaped, character in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
            mount = mount.replace(escaped, character)
        if mount and target.startswith(mount.rstrip(b"/") + b"/") and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]
