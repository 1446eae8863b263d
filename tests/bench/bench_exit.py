"""How long `otel-dflash run` stays after the trainer's end, beside a run that has nothing to send.

Run: python tests/bench/bench_exit.py     (about two minutes)
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from timing import machine, table

ROUNDS = 7
TRAINER = """
import time
import otel_dflash
worker = otel_dflash.start().worker("target", 0)
until = time.monotonic() + 2.5  # the exporters are loaded, and have tried
while time.monotonic() < until:
    with worker.step(), worker.forward:
        time.sleep(0.01)
print(time.monotonic_ns())
"""


def exit_ms(*options: str) -> float:
    """Return the ms from the last line of a trainer to the end of its run."""
    with TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "otel_dflash", "run", "--quiet", "--dir", directory, *options]
        result = subprocess.run(
            [*command, "--", sys.executable, "-c", TRAINER],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            check=True,
        )
        return (time.monotonic_ns() - int(result.stdout)) / 1e6


def main() -> None:
    with socket.socket() as refusing, socket.create_server(("127.0.0.1", 0)) as silent:
        refusing.bind(("127.0.0.1", 0))  # nobody listens
        variants: dict[str, tuple[str, ...]] = {"nothing to send": ()}
        for name, place in (("refuses", refusing), ("never answers", silent)):
            endpoint = f"http://127.0.0.1:{place.getsockname()[1]}"
            for protocol in ("grpc", "http/protobuf"):
                variants[f"collector {name}, {protocol}"] = ("--endpoint", endpoint, "--protocol", protocol)
        samples: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(ROUNDS):
            for name, options in variants.items():
                samples[name].append(exit_ms(*options))
    print(machine())
    bars = dict.fromkeys(list(variants)[1:], "<= 2000")
    table("Exit after the trainer's end", samples, "nothing to send", bars, unit="ms")


if __name__ == "__main__":
    main()
