"""How far other machines' clocks are from this one, by the Date headers of their HTTP responses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Final

from otel_dflash.doctor.finding import Finding, ok, unknown, wrong

OFFSET_S_MAX: Final = 5.0


class Clock:
    """The offsets of other clocks, by their owner."""

    def __init__(self) -> None:
        self._offsets_s: dict[str, float] = {}

    def add(self, owner: str, date: str | None, asked_s: float) -> None:
        """Add the Date header of a response; `asked_s` is this machine's time.time() before the request."""
        try:
            theirs = parsedate_to_datetime(date or "").timestamp()
        except ValueError:  # absent, or not a date
            return
        # The header has whole seconds, cut, and was made between `asked_s` and now.
        self._offsets_s[owner] = theirs + 0.5 - (asked_s + time.time()) / 2

    @property
    def has_any(self) -> bool:
        """Return whether any clock was compared."""
        return bool(self._offsets_s)

    def check(self) -> Iterator[Finding]:
        """Yield a finding for each clock."""
        for owner, offset_s in self._offsets_s.items():
            if abs(offset_s) <= OFFSET_S_MAX:
                yield ok("clock", f"{owner} agrees within {OFFSET_S_MAX:g} s")
            else:
                side = "ahead of" if offset_s > 0 else "behind"
                yield wrong(
                    "clock",
                    (
                        f"the clock of {owner} is {abs(offset_s):.0f} s {side} this machine's; let both "
                        "follow NTP (timedatectl)"
                    ),
                )
        if not self._offsets_s:
            yield unknown("clock", "not compared: no response had a Date header (gRPC has none)")
