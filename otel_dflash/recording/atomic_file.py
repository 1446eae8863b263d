"""Replacing a file as a whole."""

from __future__ import annotations

from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file: a reader sees the old bytes or the new ones. A kill may leave a temporary file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
