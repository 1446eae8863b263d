"""Tokens and loss tokens of the steps that set both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from otel_dflash import semconv
from otel_dflash.metrics.decoding import Records, Ring
from otel_dflash.metrics.ended import Names
from otel_dflash.metrics.family import Family, Moment, by_process, by_role
from otel_dflash.metrics.points import Instrument, Metric, NumberPoint


@dataclass(slots=True)
class TokenTotals:
    """Of one ring."""

    input: int = 0
    loss: int = 0


class Tokens(Family[TokenTotals]):
    """Tokens by role."""

    name = "tokens"
    version = 1

    def open(self, ring: Ring) -> TokenTotals:
        """Return the totals of a new ring."""
        return TokenTotals()

    def take_records(self, ring: Ring, records: Records) -> None:
        """Add the tokens of steps."""
        totals = self.of(ring)
        tokens, loss_tokens = records.step_tokens
        both = (tokens >= 0) & (loss_tokens >= 0)
        totals.input += sum(tokens[both].tolist())  # of Python: they may be large
        totals.loss += sum(loss_tokens[both].tolist())

    def merge(self, past: TokenTotals, totals: TokenTotals, names: Names) -> None:
        """Add tokens."""
        past.input += totals.input
        past.loss += totals.loss

    def points(self, moment: Moment) -> Iterator[Metric]:
        """Yield one metric of each process: no point for a role without such a step."""
        for pid, members in by_process(self.members(moment, with_past=True)):
            points = []
            for role, of_role in by_role(members):
                start_ns = min(member.start_ns for member in of_role)
                tokens = sum(member.sum(lambda totals: totals.input) for member in of_role)
                loss_tokens = sum(member.sum(lambda totals: totals.loss) for member in of_role)
                for kind, count in ((semconv.TOKEN_INPUT, tokens), (semconv.TOKEN_LOSS, loss_tokens)):
                    if tokens:
                        attributes = {semconv.WORKER_ROLE: role, semconv.TOKEN_TYPE: kind}
                        points.append(NumberPoint(attributes, start_ns, moment.time_ns, count))
            yield Metric(semconv.TRAINING_TOKENS, Instrument.COUNTER, pid, points)

    def dump(self, totals: TokenTotals) -> Any:
        """Return totals ready for JSON."""
        return asdict(totals)

    def load(self, ring: int, data: Any) -> TokenTotals:
        """Return what `dump` was given."""
        return TokenTotals(**data)
