"""What a trainer pays once: `import otel_dflash` and `start()`, beside importing the SDK that a tracer of its
own would need.

Run: python tests/bench/bench_start.py     (a few seconds)
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from timing import machine, table

from otel_dflash.session import create_session, register_process, remove_session

ROUNDS = 15
CHILD = """
import time
t0 = time.perf_counter()
{code}
print((time.perf_counter() - t0) * 1e3)
"""
VARIANTS = {
    "import otel_dflash": "import otel_dflash",
    "import and start(), joining `otel-dflash run`": "import otel_dflash; otel_dflash.start()",
    "import and start(), which launches the agent": (
        "import os; del os.environ['OTEL_DFLASH_SESSION']; import otel_dflash; otel_dflash.start()"
    ),
    "import the SDK's tracer and OTLP exporter": (
        "import opentelemetry.sdk.trace.export, opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    ),
}


def main() -> None:
    """Measure and print."""
    samples: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with TemporaryDirectory() as name:
        session = create_session("bench", Path(name))
        register_process(session)
        environment = {
            **os.environ,
            "OTEL_DFLASH_SESSION": str(session.path),
            "OTEL_DFLASH_DIR": name,
            "OTEL_DFLASH_AGENT": "true",
        }
        try:
            for _ in range(ROUNDS):
                for variant, code in VARIANTS.items():
                    command = [sys.executable, "-c", CHILD.format(code=code)]
                    samples[variant].append(
                        float(subprocess.check_output(command, env=environment, text=True))
                    )
        finally:
            remove_session(session)
    print(machine())
    bars = {
        "import and start(), joining `otel-dflash run`": "<= 30",
        "import and start(), which launches the agent": "<= 30 besides it",
    }
    table("Start of a trainer", samples, "import otel_dflash", bars, "ms")
    joined = statistics.median(samples["import and start(), joining `otel-dflash run`"])
    print(f"import and start() take {joined:.1f} ms (bar: <= 30)")


if __name__ == "__main__":
    main()
