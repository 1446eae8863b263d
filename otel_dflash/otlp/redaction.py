"""Text without credentials."""

from __future__ import annotations

import re
from typing import Final

_USER_INFO: Final = re.compile(r"//\S*@")  # up to the last @: a password may hold one, and a /


_HEADER: Final = re.compile(
    r"(header (?:name|part|value|metadata)\b[^:]*: |metadata was invalid: ).*", re.IGNORECASE
)


def redact(text: str) -> str:
    """Return text without the user and password of URLs, and without headers that requests quotes."""
    return _HEADER.sub(r"\1***", _USER_INFO.sub("//***@", text))
