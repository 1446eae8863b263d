"""The gate before the hot path: instructions instead of time, so no neighbour, clock rate or CPU moves it.

Run: make instructions             (half a minute; fails when a line costs over 10 % more than baseline.json says)
     make instructions-baseline    (writes this interpreter's lines into baseline.json: say why in the commit)
     python -m tests.instructions.gate [--renew] /opt/python3.12/bin/python ...    (other interpreters)

Each line is a ratio to as many pairs of clock reads on the same interpreter. callgrind counts 2 000 turns, not the
100 000 that the table shows: it takes 50 times as long as the machine, and a turn costs the same each time (7 000
turns give the ratios of 2 000 within 0.3 %; a second run gives the same number to the last instruction).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).parents[2]
BASELINE: Final = Path(__file__).with_name("baseline.json")
UNIT: Final = "two clock reads"
GROWTH_MAX: Final = 0.10
SHOWN_TURNS: Final = 100_000
RENEW: Final = "make instructions-baseline"


def minor_version(python: str) -> str:
    """Return "3.11" of an interpreter."""
    asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def count(python: str) -> dict[str, int]:
    """Return the instructions of SHOWN_TURNS turns, by line of the table.

    Raises:
        RuntimeError: valgrind is missing, fails, or does not see the marks between bursts.
    """
    from tests.instructions.bursts import FEW, MANY

    if shutil.which("valgrind") is None:
        raise RuntimeError("valgrind is missing: apt-get install valgrind, or what your system calls it")
    with TemporaryDirectory() as directory:
        # nothing but this program decides what runs: no site-packages, no seed, no variable of the caller
        result = subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                "--dump-before=getppid",
                f"--callgrind-out-file={directory}/counted",
                *(python, "-S", str(ROOT / "tests/instructions/bursts.py")),
            ],
            cwd=directory,
            env={
                "PATH": os.defpath,
                "PYTHONPATH": str(ROOT),
                "PYTHONHASHSEED": "0",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OTEL_DFLASH_NODE": "node",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise RuntimeError(f"callgrind ended with {result.returncode}:\n{result.stderr}")
        lines = result.stdout.splitlines()
        parts = [
            total(path)
            for path in sorted(Path(directory).glob("counted.*"), key=lambda path: int(path.suffix[1:]))
        ]
    if len(parts) != 2 * len(lines) + 1:
        raise RuntimeError(f"callgrind saw {len(parts)} calls of getppid() instead of {2 * len(lines) + 1}")
    few, many = parts[1::2], parts[2::2]  # the first is the start-up
    return {
        line: round((more - less) * SHOWN_TURNS / (MANY - FEW))
        for line, less, more in zip(lines, few, many, strict=True)
    }


def total(path: Path) -> int:
    """Return the instructions in one file of callgrind."""
    found = re.search(r"^totals: (\d+)$", path.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{path.name} of callgrind has no totals")
    return int(found[1])


def ratios(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the counts in pairs of clock reads, as baseline.json holds them."""
    return {line: round(counts[line] / counts[UNIT], 2) for line in counts if line != UNIT}


def table(counts: Mapping[str, int], baseline: Mapping[str, float]) -> list[str]:
    """Return the lines to print."""
    found = ratios(counts)
    rows = [
        f"{f'{SHOWN_TURNS:,} times':36} {'instructions':>14} {'/ ' + UNIT:>18} {'baseline':>9} {'change':>7}"
    ]
    for line, instructions in counts.items():
        row = f"{line:36} {instructions:14,} {found.get(line, 1):18.2f}"
        if line in baseline:
            row += f" {baseline[line]:9.2f} {found[line] / baseline[line] - 1:+7.1%}"
        rows.append(row)
    return rows


def verdicts(found: Mapping[str, float], baseline: Mapping[str, float]) -> list[str]:
    """Return what is wrong, one line each: what costs too much, and what only one side has."""
    wrong = [f"{line} is not in the baseline: {RENEW}" for line in found if line not in baseline]
    wrong += [
        f"{line} is in the baseline and is not counted: {RENEW}" for line in baseline if line not in found
    ]
    wrong += [
        f"{line} costs {found[line]:.2f} x {UNIT}, {found[line] / base - 1:+.1%} over the baseline of {base:.2f} x "
        f"(at most {GROWTH_MAX:+.0%}); if it is worth that: {RENEW}, and say why in the commit"
        for line, base in baseline.items()
        if line in found and found[line] > base * (1 + GROWTH_MAX)
    ]
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Check or renew; return the exit code."""
    renew = "--renew" in arguments
    baselines: dict[str, dict[str, float]] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    wrong: list[str] = []
    for python in [argument for argument in arguments if argument != "--renew"] or [sys.executable]:
        version = minor_version(python)
        counts = count(python)
        baseline = baselines.get(version, {})
        print(f"Python {version}", *table(counts, baseline), sep="\n", flush=True)
        if renew:
            baselines[version] = ratios(counts)
        elif not baseline:
            wrong.append(
                f"no baseline for Python {version}: {RENEW} with that Python, and commit {BASELINE.name}"
            )
        else:
            wrong += verdicts(ratios(counts), baseline)
    if renew:
        BASELINE.write_text(
            json.dumps(dict(sorted(baselines.items(), key=lambda item: int(item[0][2:]))), indent=2) + "\n"
        )
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
