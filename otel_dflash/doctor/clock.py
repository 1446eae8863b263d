"""How far other machines' clocks are from this one, by the Date header of their HTTP answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Final

from otel_dflash.doctor.lines import Line, ok, unknown, wrong

OFFSET_S_MAX: Final = 5.0


class Clock:
    """Collects offsets by whose clock it is."""

    def __init__(self) -> None:
        self._offsets_s: dict[str, float] = {}

    def add(self, whose: str, date: str | None, asked: float) -> None:
        """Take the Date header of an answer; `asked` is this machine's time.time() before the request."""
        try:
            theirs = parsedate_to_datetime(date or "").timestamp()
        except ValueError:  # none, or none that is a date
            return
        # The header has whole seconds, cut, and was made between `asked` and now.
        self._offsets_s[whose] = theirs + 0.5 - (asked + time.time()) / 2

    @property
    def has_any(self) -> bool:
        """Return whether any clock was seen."""
        return bool(self._offsets_s)

    def lines(self) -> Iterator[Line]:
        """Yield one line per clock."""
        for whose, offset_s in self._offsets_s.items():
            if abs(offset_s) <= OFFSET_S_MAX:
                yield ok("clock", f"{whose} agrees within {OFFSET_S_MAX:g} s")
            else:
                side = "ahead of" if offset_s > 0 else "behind"
                yield wrong(
                    "clock",
                    f"the clock of {whose} is {abs(offset_s):.0f} s {side} this machine's; let both follow NTP (timedatectl)",
                )
        if not self._offsets_s:
            yield unknown("clock", "not compared: nothing that was asked says the time (gRPC alone does not)")
