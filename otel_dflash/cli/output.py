"""Standard output of a command whose reader may leave early, as `head` does."""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO


class _Output(io.FileIO):
    """The file descriptor of a stream. It discards what nobody reads any more, and what follows a failure:
    that is reported once, and not again at the exit."""

    def __init__(self, stream: TextIO) -> None:
        """Write to the descriptor of `stream`, which stays open for as long."""
        super().__init__(stream.fileno(), "w", closefd=False)
        self._stream = stream
        self._has_failed = False

    def write(self, data: Any, /) -> int:
        """Write; a pipe without a reader takes all of it."""
        if not self._has_failed:
            try:
                return super().write(data)
            except BrokenPipeError:
                pass
            except OSError:
                self._has_failed = True
                raise
        return memoryview(data).nbytes


def outlive_reader() -> None:
    """Let this process run to its end, with its own exit code, when the reader of its stdout has left.

    Called once, before anything is printed. The child processes have a stdout of their own.
    """
    old = sys.stdout
    try:
        raw = _Output(old)
    except (OSError, ValueError):  # an object without a file descriptor: no pipe
        return
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=old.isatty(),
    )
