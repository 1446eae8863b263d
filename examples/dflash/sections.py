"""The script's own timing and counting of the sections of a worker's loop, and the delays of --slow."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import otel_dflash  # telemetry

SECTIONS = {
    "target": ("queue_get", "model_forward", "pack_hidden", "queue_put"),
    "postprocess": ("queue_get", "d2h", "queue_put"),
    "drafter": ("queue_get", "forward", "backward", "optimizer"),
}
KINDS = ("sleep", "cpu", "lock", "error")
planted_lock = threading.Lock()


class PlantedError(Exception):
    """Raised by --slow with the kind `error`."""


@dataclass(frozen=True)
class Slow:
    """One added delay: where, how long, and what it does meanwhile."""

    role: str
    index: int | None  # None = every worker of the role
    section: str
    seconds: float
    kind: str

    def wait(self) -> None:
        if self.kind == "cpu":
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        elif self.kind == "lock":
            held = threading.Event()
            threading.Thread(target=self.hold, args=(held,), name="planted lock", daemon=True).start()
            held.wait()
            with planted_lock:
                pass
        else:
            time.sleep(self.seconds)
        if self.kind == "error":
            raise PlantedError(f"planted by --slow in {self.role}.{self.section}")

    def hold(self, held: threading.Event) -> None:
        with planted_lock:
            held.set()
            time.sleep(self.seconds)


def parse_slow(text: str) -> Slow:
    """Read ROLE:INDEX:SECTION=20ms[:KIND]. Raises ValueError with the reason."""
    form = re.fullmatch(r"(\w+):(\d+|\*):(\w+)=(\d+(?:\.\d+)?)(ms|s)(?::(\w+))?", text)
    if not form:
        raise ValueError(
            f"must look like target:1:pack_hidden=20ms or target:*:pack_hidden=0.5s:cpu, got {text!r}"
        )
    role, index, section, number, unit, kind = form.groups(default="sleep")
    if role not in SECTIONS:
        raise ValueError(f"the role must be one of {', '.join(SECTIONS)}, got {role!r}")
    if section not in SECTIONS[role]:
        raise ValueError(f"a section of {role} must be one of {', '.join(SECTIONS[role])}, got {section!r}")
    if kind not in KINDS:
        raise ValueError(f"the kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return Slow(
        role,
        None if index == "*" else int(index),
        section,
        float(number) * (0.001 if unit == "ms" else 1.0),
        kind,
    )


class Sections:
    """One worker's sections: `with sections("forward"):` times and counts it, and is where telemetry hooks
    in.

    `counts` and `steps` are plain integers that know nothing of telemetry. `timings_ms` is the newest
    snapshot, the mean of each section over the last `interval` steps; the monitor shows it.
    """

    def __init__(self, role: str, index: int, gpu: int | None, slow: list[Slow], interval: int) -> None:
        self.role, self.index, self.interval = role, index, interval
        self.worker = otel_dflash.start().worker(role, index, gpu)  # telemetry
        self.planted = [
            planted for planted in slow if planted.role == role and planted.index in (None, index)
        ]
        self.steps = self.tokens = 0
        self.counts = dict.fromkeys(SECTIONS[role], 0)
        self.timings_ms: dict[str, float] = {}
        self._seconds = dict.fromkeys(SECTIONS[role], 0.0)

    @contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self.worker.phase(section):  # telemetry
                for planted in self.planted:
                    if planted.section == section:
                        planted.wait()
                yield
        finally:
            self.counts[section] += 1
            self._seconds[section] += time.perf_counter() - start

    def close(self) -> None:
        """End the worker: time from now on does not count as its waiting."""
        self.worker.close()  # telemetry

    def next_step(self) -> None:
        """Count a step that begins; after every `interval` steps leave a snapshot of the timings."""
        if self.steps and self.steps % self.interval == 0:
            self.timings_ms = {
                section: 1000 * total / self.interval for section, total in self._seconds.items()
            }
            self._seconds = dict.fromkeys(self._seconds, 0.0)
        self.steps += 1
