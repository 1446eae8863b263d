"""A ring file: made by a worker, opened by the agent. Its layout is drawn in records.py; writing records is trainer/writer.py.

The file is reserved with posix_fallocate and touched before use: on a full tmpfs a store into a file that was only truncated to
size is SIGBUS, and it killed the process when tried. Where the tmpfs is full the ring is a memfd (its pages are not the tmpfs's),
announced by a symbolic link to /proc/<pid>/fd/<n>, which needs no block. Never a file on disk: a store stalls under writeback.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from hashlib import blake2b
from pathlib import Path
from typing import Final

from otel_dflash.records import (
    DESCRIPTOR_BYTES_MAX,
    LIVE_OFFSET,
    MAGIC,
    NAME_TEXT_BYTES_MAX,
    NAMES_MAX,
    NAMES_OFFSET,
    OTHER_NAME,
    OTHER_NAME_ID,
    RECORD_BYTES,
    RECORDED_OFFSET,
    SERIAL_BITS,
    SLOTS_OFFSET,
    WORD_BYTES,
    Counter,
    Header,
    NameKind,
)
from otel_dflash.session import process_start

_PAGE: Final = 4096


class Ring:
    """The writer's end of one ring: header, names, and the memory that the writer binds."""

    def __init__(
        self, memory: mmap.mmap, number: int, role: str, index: int, gpu: int | None, run_id: str, link: int | None = None
    ) -> None:
        """Format memory of SLOTS_OFFSET bytes and any number of slots. `link`: the memfd that dies with this process."""
        self.pid = pid = os.getpid()
        start = process_start(pid) or 0
        identity = f"{run_id} {os.uname().nodename} {pid} {start} {number}".encode()
        self.id = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little") >> SERIAL_BITS << SERIAL_BITS
        self.memory = memory
        self.slots = (len(memory) - SLOTS_OFFSET) // RECORD_BYTES
        self.words = memoryview(memory).cast("Q")
        self.live = self.words[LIVE_OFFSET // WORD_BYTES : RECORDED_OFFSET // WORD_BYTES]
        self._link = link
        self._names: dict[tuple[int, str], int] = {}
        self._name_offset = NAMES_OFFSET
        self._naming = threading.Lock()
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

    def intern(self, kind: NameKind, text: str) -> int:
        """Return the id of a name, publishing it when it is new; OTHER_NAME_ID beyond the caps. Any thread; never raises or blocks."""
        known = self._names.get((kind, text))
        if known is not None:
            return known
        if os.getpid() != self.pid or not self._naming.acquire(False):  # another thread, or the code that a signal handler interrupted
            return self._other()
        try:
            name_id = len(self._names)
            limit = NAME_TEXT_BYTES_MAX if kind in (NameKind.TEXT, NameKind.PHASE) else DESCRIPTOR_BYTES_MAX
            data = text.encode("utf-8", "replace")
            data = data if len(data) <= limit else data[:limit].decode("utf-8", "ignore").encode()
            end = self._name_offset + 3 + len(data)
            if name_id >= NAMES_MAX or end > SLOTS_OFFSET:
                return self._other()
            self.memory[self._name_offset : end] = len(data).to_bytes(2, "little") + bytes((kind,)) + data
            self._name_offset = end
            self._names[kind, text] = name_id
            self.words[Header.NAMES] = name_id + 1
            return name_id
        finally:
            self._naming.release()

    def names(self) -> list[tuple[int, str]]:
        """Return every name in the order of the ids."""
        return list(self._names)

    def count(self, counter: Counter) -> None:
        """Add one to a counter. Slow paths only: two threads at once may lose one. Nothing in a forked child: the ring is its parent's."""
        if os.getpid() == self.pid:
            self.words[Header.COUNTERS + counter] += 1

    def close(self) -> None:
        """Say that no record follows. The agent takes what is left and removes the file. Nothing in a forked child."""
        if os.getpid() == self.pid and not self.words[Header.CLOSED]:
            self.words[Header.CLOSED] = time.monotonic_ns()

    @property
    def must_wait_for_reader(self) -> bool:
        """Return whether the ring dies with this process unless a reader has opened it."""
        return self._link is not None and not self.words[Header.ATTACHED]

    def __del__(self) -> None:
        """Close the ring of a worker that nobody holds any more."""
        if hasattr(self, "words"):
            self.close()

    def _other(self) -> int:
        self.count(Counter.DROPPED_NAME)
        return OTHER_NAME_ID


def create_ring(directory: Path, number: int, size_bytes: int, role: str, index: int, gpu: int | None, run_id: str) -> Ring:
    """Create and publish the ring file `ring-<pid>-<number>` of a session directory.

    Raises:
        OSError: Neither the tmpfs nor a memfd has room for it.
    """
    path = directory / f"ring-{os.getpid()}-{number}"
    draft = path.with_name(f".{path.name}")
    try:
        memory = _reserve_file(draft, size_bytes)
    except OSError:
        link = os.memfd_create("otel-dflash-ring", os.MFD_CLOEXEC)
        try:
            ring = Ring(_map(link, size_bytes), number, role, index, gpu, run_id, link)
            path.symlink_to(f"/proc/{os.getpid()}/fd/{link}")
        except OSError:
            os.close(link)
            raise
        return ring
    ring = Ring(memory, number, role, index, gpu, run_id)
    draft.rename(path)  # a reader never sees a half-made ring
    return ring


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
    """Return whether the directory lies in memory, by the mount table."""
    best = ("", "")
    target = f"{directory.resolve()}/"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split(" ")
        if target.startswith(mount.rstrip("/") + "/") and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1] == "tmpfs"
