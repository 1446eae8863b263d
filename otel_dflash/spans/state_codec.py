"""Numbers as text, for the saved state of a replay."""

from __future__ import annotations

import base64
import struct
from collections.abc import Collection, Iterable


def encode_words(words: Collection[int]) -> str:
    """Return unsigned 64-bit integers as base64 text."""
    return encode_bytes(struct.pack(f"<{len(words)}Q", *words))


def encode_bytes(values: Iterable[int]) -> str:
    """Return integers 0..255 as base64 text."""
    return base64.b64encode(bytes(values)).decode()


def decode_words(text: str) -> tuple[int, ...]:
    """Return what `encode_words` took.

    Raises:
        ValueError: `text` is not base64, or its length is not a multiple of eight bytes.
        TypeError: `text` is not a string.
    """
    data = decode_bytes(text)
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are not whole 64-bit words")
    return struct.unpack(f"<{len(data) // 8}Q", data)


def decode_bytes(text: str) -> bytes:
    """Return what `encode_bytes` took.

    Raises:
        ValueError: `text` is not base64.
        TypeError: `text` is not a string.
    """
    return base64.b64decode(text, validate=True)
