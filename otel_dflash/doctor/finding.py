"""What the doctor reports: one finding for each check."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Status(Enum):
    """The result of a check; the value is what is printed."""

    OK = "ok"
    WARNING = "warn"
    WRONG = "WRONG"
    UNKNOWN = "-"
    """Not checked; the text has the reason."""


class Finding(NamedTuple):
    """One check."""

    status: Status
    check: str
    text: str
    """What was found, on one line; where something is wrong, also the remedy. It never contains a
    credential."""
    took_s: float | None = None
    """How long this hop took, in seconds."""


class HopError(Exception):
    """A hop does not work; the text has the fault and the remedy."""


def ok(check: str, text: str, took_s: float | None = None) -> Finding:
    """Return the finding that all is well."""
    return Finding(Status.OK, check, text, took_s)


def warning(check: str, text: str, took_s: float | None = None) -> Finding:
    """Return the finding that something works but may surprise."""
    return Finding(Status.WARNING, check, text, took_s)


def wrong(check: str, text: str, took_s: float | None = None) -> Finding:
    """Return the finding that something does not work, with the remedy."""
    return Finding(Status.WRONG, check, text, took_s)


def unknown(check: str, text: str) -> Finding:
    """Return the finding that something could not be checked, with the reason."""
    return Finding(Status.UNKNOWN, check, text)
