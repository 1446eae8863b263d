"""What the doctor says: one line a check."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Status(Enum):
    """How a check ended; the value is what is printed."""

    OK = "ok"
    WARNING = "warn"
    WRONG = "WRONG"
    UNKNOWN = "-"
    """Not checked; the text says why."""


class Line(NamedTuple):
    """One check."""

    status: Status
    check: str
    text: str
    """What was found; of what is wrong also the remedy, on the same line. No credential is ever in it."""
    took_s: float | None = None
    """How long this hop took, in seconds."""


class HopError(Exception):
    """A hop that does not work; the text says what and the remedy."""


def ok(check: str, text: str, took_s: float | None = None) -> Line:
    """Return the line of what is as it should be."""
    return Line(Status.OK, check, text, took_s)


def warning(check: str, text: str, took_s: float | None = None) -> Line:
    """Return the line of what works and may surprise."""
    return Line(Status.WARNING, check, text, took_s)


def wrong(check: str, text: str, took_s: float | None = None) -> Line:
    """Return the line of what does not work, with its remedy."""
    return Line(Status.WRONG, check, text, took_s)


def unknown(check: str, text: str) -> Line:
    """Return the line of what could not be checked, with why."""
    return Line(Status.UNKNOWN, check, text)
