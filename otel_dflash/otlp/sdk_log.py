"""The SDK's log in readable form: one line per kind of failure with a count, no traceback, no credentials."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Final, TextIO

from otel_dflash.console import printable
from otel_dflash.otlp.failures import NO_ANSWER, TEXT_MAX, reason_of, remedy_in
from otel_dflash.otlp.redaction import redact

REPEAT_S: Final = 30.0

_KINDS_MAX: Final = 100
_SECRET_LOGGER: Final = "opentelemetry.util.re"  # it logs the header that it cannot parse
_NUMBER: Final = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")
_RETRIED: Final = "Transient error "
_OTHER_LOOPBACK: Final = re.compile(r"ipv6:(?:%5B|\[)::1(?:%5D|\]):.*refused", re.IGNORECASE)


class SdkLog(logging.Handler):
    """Handler for the logger tree ``opentelemetry``.

    A new kind of failure is logged at once, then at most every `repeat_s`. Failures with the same remedy are
    of one kind, else those with the same reason apart from numbers, whichever exporter reports them; without
    a reason, those of one logger and message template. As a context manager it takes over the tree: other
    handlers get no records of it.
    """

    def __init__(
        self, stream: TextIO, repeat_s: float = REPEAT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(logging.WARNING)
        self.reasons: dict[str, str] = {}
        """Thread (a sink has one) -> why its newest export failed, one line."""
        self._explained: set[str] = set()  # threads whose export is retried for a reason already logged
        self._stream = stream
        self._repeat_s = repeat_s
        self._clock = clock
        self._kinds: dict[tuple[str, ...], tuple[int, float]] = {}  # count, time of the last line

    def __enter__(self) -> SdkLog:
        logger = logging.getLogger("opentelemetry")
        self._before = logger.propagate, logger.level
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.removeHandler(self)
        logger.propagate, level = self._before
        logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record under its kind; write a line when it is due."""
        try:
            self._take(record)
        # arguments that do not match the template, a log on a full disk
        except (TypeError, ValueError, LookupError, OSError):
            self.handleError(record)

    def _take(self, record: logging.LogRecord) -> None:
        template = str(record.msg)
        text = template.split(": %s")[0] if record.name == _SECRET_LOGGER else record.getMessage()
        text = printable(redact(" ".join(text.split())))
        reason = reason_of(text)
        thread = record.threadName or ""
        if reason:
            if not _OTHER_LOOPBACK.search(reason):
                self.reasons[thread] = reason
            else:  # the name has two addresses, the collector listens on one: its answer is more useful
                self.reasons.setdefault(thread, reason)
            if text.startswith(_RETRIED):
                self._explained.add(thread)
        elif NO_ANSWER in text and thread in self._explained:
            self._explained.discard(thread)
            return  # the end of an export whose reason was logged
        elif NO_ANSWER in text:
            self.reasons[thread] = "no success before the timeout"
        kind = (_kind(reason),) if reason else (record.name, template)
        if kind not in self._kinds and len(self._kinds) >= _KINDS_MAX:
            self._kinds.pop(next(iter(self._kinds)))
        count, said_s = self._kinds.get(kind, (0, -self._repeat_s))
        now_s = self._clock()
        due = count == 0 or now_s - said_s >= self._repeat_s
        self._kinds[kind] = count + 1, now_s if due else said_s
        if due:
            times = f" ({count + 1} times)" if count else ""
            self._stream.write(f"otel-dflash: {_message(text, reason)}{times}\n")
            self._stream.flush()


def _kind(reason: str) -> str:
    return remedy_in(reason) or _NUMBER.sub("#", reason)


def _message(text: str, reason: str | None) -> str:
    """Return the line: what failed up to where its reason starts, then the reason."""
    if reason is None or reason.startswith(text[:40]):
        return reason or text[:TEXT_MAX]
    head = re.split(rf", error code: | batch code: |{_RETRIED}", text)[0].strip()
    return f"{head[:TEXT_MAX] or 'Export is retried'}: {reason}"
