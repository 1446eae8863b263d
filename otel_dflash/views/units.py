"""Numbers as a person reads them, with three or four significant digits."""

from __future__ import annotations

_DURATIONS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))


def duration(ns: int) -> str:
    """Return "12.3 ms"; from 1000 s on "1 h 02 m"."""
    if ns >= 1000 * 1_000_000_000:
        minutes = round(ns / 60_000_000_000)
        return f"{minutes // 60} h {minutes % 60:02} m"
    for unit_ns, unit in _DURATIONS:
        if ns >= unit_ns * 0.9995:
            return f"{_digits(ns / unit_ns)} {unit}"
    return f"{ns} ns"


def size(count: int) -> str:
    """Return "12.3 MB"."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power * 0.9995:
            return f"{_digits(count / 10**power)} {unit}"
    return f"{count} B"


def integer(value: int) -> str:
    """Return "12 345 678"."""
    return f"{value:,}".replace(",", " ")


def percent(share: float) -> str:
    """Return "12.3 %", of a share 0..1."""
    return f"{100 * share:.1f} %"


def small_percent(share: float) -> str:
    """Return a share that may be far below one percent, with two significant digits."""
    return f"{100 * share:.2g} %" if share < 1 else f"{integer(round(100 * share))} %"


def plural(count: int, noun: str) -> str:
    """Return "1 worker" or "3 workers"."""
    return f"{integer(count)} {noun if count == 1 else noun + ('es' if noun.endswith('s') else 's')}"


def _digits(value: float) -> str:
    """Return three significant digits: 1.23, 12.3, 123."""
    for places in (2, 1, 0):
        text = f"{value:.{places}f}"
        if len(text.replace(".", "")) <= 3:
            return text
    return text
