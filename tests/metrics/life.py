"""Workers that live on a clock of their own, with every ns of their lives planted."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from otel_dflash.recording.frames import Frame
from otel_dflash.recording.payloads import Open, OpenWork
from tests.metrics.planted import PlantedRing, open_frame

CREATED = 1_000_000_000


@dataclass
class Life:
    """A worker's life. Every ns is planted in `truth` as it is spent, the gaps too.

    `frames` are what a drain appends. With `open_ratio`, that share of moments has an OPEN frame, and `moments`
    gets its position with the truth at that time.
    """

    random: random.Random
    ring: PlantedRing
    open_ratio: float = 0.0
    now: int = CREATED
    truth: Counter[str] = field(default_factory=Counter)
    durations: dict[tuple[str, str | None], list[int]] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    moments: list[tuple[int, int, Counter[str]]] = field(default_factory=list)
    step_start: int = 0
    stack: list[Open] = field(default_factory=list)

    def spend(self, state: str) -> None:
        for _ in range(2):
            spent = self.random.choice([0, 1, 17, 1_000, 250_000, 3_000_000])
            self.truth[state.upper()] += spent
            self.now += spent
            if self.random.random() < self.open_ratio:
                self.say_what_is_open()

    def say_what_is_open(self) -> None:
        """Append what a drain appends: all records, and then what is open."""
        if self.ring.slots:
            self.frames.append(self.ring.flush(self.now))
        step = Open(self.ring.ring + self.ring.serial + 1, self.step_start) if self.step_start else None
        work = OpenWork(step, tuple(self.stack))
        self.moments.append((len(self.frames), self.now, +self.truth))
        self.frames.append(open_frame(self.now, {self.ring.ring: work}))

    def phase(self, depth: int) -> None:
        state = self.random.choice(["busy", "starved", "backpressured", "lock_wait"])
        name = self.random.choice(["forward", "queue_get", "lock"])
        error = self.random.choice([None, None, None, "ValueError"])
        start = self.now
        self.stack.append(Open(self.ring.name(3, f"{state} {name}"), start))
        self.spend(state)
        while depth and self.random.random() < 0.4:
            self.phase(depth - 1)
            self.spend(state)
        self.stack.pop()
        self.durations.setdefault((f"{state} {name}", error), []).append(self.now - start)
        self.ring.phase(name, start, self.now, state, error)

    def step(self, depth: int) -> None:
        start = self.step_start = self.now
        for _ in range(self.random.randrange(5)):
            self.spend("other")
            self.phase(depth)
        self.spend("other")
        self.step_start = 0
        self.durations.setdefault(("step", None), []).append(self.now - start)
        self.ring.step(start, self.now)

    def live(self, actions: int, depth: int) -> list[Frame]:
        for _ in range(actions):
            self.spend("other")
            self.step(depth) if self.random.random() < 0.7 else self.phase(depth)
            if self.random.random() < 0.3:
                slots, cut = self.ring.slots, self.random.randrange(len(self.ring.slots) + 1)
                self.ring.slots = slots[:cut]  # a parent may come in a later frame than its child
                self.frames.append(self.ring.flush(self.now))
                self.ring.slots = slots[cut:]
        self.frames.append(self.ring.flush(self.now))
        return self.frames
