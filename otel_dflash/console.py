"""Printing our own lines, to stderr: stdout belongs to the user's program."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def report(text: str) -> None:
    """Print a line or lines to the user. Never raises: stderr may be closed, on a full disk, or replaced."""
    _print(f"otel-dflash: {text}")


def log(text: str) -> None:
    """Print a line or lines with the time to the agent's log. Never raises."""
    _print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} otel-dflash agent: {text}")


def printable(text: str) -> str:
    """Return text in which escapes stand for what could control a terminal or end the line: names, keys and
    error types are the user's, and a recording may be anybody's."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def short_path(path: Path) -> str:
    """Return a path as a user types it: relative if it is below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _print(line: str) -> None:
    if sys.stderr is None:  # closed; print would take stdout instead
        return
    try:
        print(*map(printable, line.split("\n")), sep="\n", file=sys.stderr, flush=True)
    except Exception:  # noqa: BLE001  a user's object may raise anything, and nothing may raise into training
        return
