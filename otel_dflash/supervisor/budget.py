"""How often a process that ends too early may be started again, and how soon."""

from __future__ import annotations

from typing import Final

RESTARTS_MAX: Final = 5
RESTART_BACK_S: Final = 60.0
HEALTHY_S: Final = 10.0
BACKOFF_S: Final = (0.1, 5.0)


class RestartBudget:
    """A token bucket: RESTARTS_MAX restarts at once, and one more each RESTART_BACK_S.

    Of those that follow each other in less than HEALTHY_S, the first is immediate, and the others wait twice
    as long each time.
    """

    def __init__(self, now_s: float) -> None:
        self._tokens = float(RESTARTS_MAX)
        self._counted_s = now_s
        self._backoff_s = 0.0  # before the next restart, if it follows quickly

    def take(self, now_s: float, lived_s: float) -> float:
        """Take a restart of a process that has lived `lived_s`; return the seconds to wait before it."""
        gained = (now_s - self._counted_s) / RESTART_BACK_S
        self._tokens = min(float(RESTARTS_MAX), self._tokens + gained) - 1
        self._counted_s = now_s
        backoff_s = 0.0
        if lived_s < HEALTHY_S:
            first_s, longest_s = BACKOFF_S
            backoff_s = self._backoff_s
            self._backoff_s = min(max(first_s, 2 * backoff_s), longest_s)
        else:
            self._backoff_s = 0.0
        return max(backoff_s, -self._tokens * RESTART_BACK_S)
