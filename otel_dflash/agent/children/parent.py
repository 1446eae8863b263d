"""The child's side: answers the parent's requests and announces each call that may hang.

Imports the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Parent:
    """The parent, as the program of a child sees it. Any thread may announce calls."""

    def __init__(self) -> None:
        """Take stdout for the protocol; what a library prints there goes to stderr from now on. What it has
        printed so far is a line of its own."""
        self._messages = os.dup(1)
        os.dup2(2, 1)
        os.write(self._messages, b"\n")
        self._writing = threading.Lock()

    def serve(self, answers: Mapping[str, Callable[[Parent], Any]]) -> None:
        """Answer requests by name until stdin ends because the parent closed it or is gone."""
        for line in sys.stdin.buffer:
            try:
                self._write({"result": answers[json.loads(line)["request"]](self)})
            except BrokenPipeError:
                return
            except Exception as error:  # noqa: BLE001  reported to the parent, whatever it is
                self._write({"error": f"{type(error).__name__}: {error}"})

    @contextmanager
    def entering(self, call: str) -> Iterator[None]:
        """Announce a call that may hang, before it and after it."""
        self._write({"enter": call})
        try:
            yield
        finally:
            self._write({"leave": call})

    def _write(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._writing:
            while data:
                data = data[os.write(self._messages, data) :]
