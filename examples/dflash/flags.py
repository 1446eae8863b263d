"""The command line. Standard library only, so that a wrong flag is reported at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sections import Slow, parse_slow

# with more drafters a gradient is older when it is applied, and helps less
STEPS_DEFAULT, STEPS_PER_MORE_DRAFTER = (
    500,
    250,
)
TEXT_BYTES_MIN = 20_000


def at_least(minimum: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text!r}")
    return value


def count(text: str) -> int:
    return at_least(1, text)


def natural(text: str) -> int:
    return at_least(0, text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return value


def slow(text: str) -> Slow:
    try:
        return parse_slow(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def readable(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    if path.stat().st_size < TEXT_BYTES_MIN:
        raise argparse.ArgumentTypeError(
            f"must have at least {TEXT_BYTES_MIN} bytes, {text} has {path.stat().st_size}"
        )
    return path


def writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"not a file in an existing directory: {text}")
    return path


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a mistake ends the program with a one-line reason and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description=(
            "Teach a tiny target model, train a DFlash drafter for it with a threaded pipeline, and decode "
            "with both. On the CPU."
        ),
    )
    parser.add_argument("--targets", type=count, metavar="N", help="target workers (2)")
    parser.add_argument(
        "--drafters", type=count, metavar="N", help="drafter workers, replicas with one shared optimizer (1)"
    )
    parser.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help="steps of all drafters together (500, 250 more for each further one)",
    )
    parser.add_argument(
        "--accumulate",
        type=count,
        default=2,
        metavar="N",
        help="queue items that make one drafter step (%(default)s)",
    )
    parser.add_argument(
        "--teach-steps",
        type=count,
        default=400,
        metavar="N",
        help="steps to teach the target first (%(default)s)",
    )
    parser.add_argument(
        "--decode-tokens",
        type=count,
        default=64,
        metavar="N",
        help="tokens to decode per prompt (%(default)s)",
    )
    parser.add_argument(
        "--text", type=readable, metavar="FILE", help="text to learn (the manual pages that Python ships)"
    )
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--capacity",
        type=count,
        default=16,
        metavar="N",
        help="items the hidden-state queue holds (%(default)s)",
    )
    parser.add_argument(
        "--min-ready",
        type=count,
        default=4,
        metavar="N",
        help="items it must hold before it gives one (%(default)s)",
    )
    parser.add_argument(
        "--log-interval",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="between two log lines (%(default)s)",
    )
    parser.add_argument(
        "--profile-interval",
        type=count,
        default=20,
        metavar="STEPS",
        help="steps a timing is the mean of (%(default)s)",
    )
    parser.add_argument(
        "--slow",
        type=slow,
        action="append",
        default=[],
        metavar="ROLE:INDEX:SECTION=20ms[:KIND]",
        help=(
            "plant a delay; INDEX may be *; KIND: sleep, cpu (burns it), lock (another thread holds one), "
            "error (then fails)"
        ),
    )
    parser.add_argument(
        "--simulate", action="store_true", help="sleep instead of device work; nothing is trained or decoded"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="one worker each, items in order: same seed, same weights",
    )
    parser.add_argument("--counts", type=writable, metavar="FILE", help="write what was executed as JSON")
    flags = parser.parse_args(arguments)
    if flags.deterministic and ((flags.targets or 1) > 1 or (flags.drafters or 1) > 1):
        parser.error("--deterministic runs one target and one drafter; leave out --targets and --drafters")
    if flags.min_ready > flags.capacity:
        parser.error(f"--min-ready {flags.min_ready} can't be reached: --capacity is {flags.capacity}")
    flags.targets = flags.targets or (1 if flags.deterministic else 2)
    flags.drafters = flags.drafters or 1
    flags.default_steps = flags.steps is None
    flags.steps = flags.steps or STEPS_DEFAULT + STEPS_PER_MORE_DRAFTER * (flags.drafters - 1)
    workers = {"target": flags.targets, "postprocess": 1, "drafter": flags.drafters}
    for planted in flags.slow:
        if planted.index is not None and planted.index >= workers[planted.role]:
            parser.error(
                f"--slow: there is no {planted.role} {planted.index}, only {workers[planted.role]} (from 0)"
            )
    return flags
