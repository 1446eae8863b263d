"""Every setting: flag > ``OTEL_DFLASH_*`` > default. ``OTEL_*`` belongs to the SDK and is passed on as it is.

==========================  ===============================================================  ==================
variable                    meaning                                                          default
==========================  ===============================================================  ==================
OTEL_DFLASH_DISABLED        ``true`` turns all of it off (as does OTEL_SDK_DISABLED)         false
OTEL_DFLASH_DIR             directory of the recordings                                      ./dflash-runs
OTEL_DFLASH_RUN_ID          the run's name: letters, digits, ``._-``, at most 64             time and random
OTEL_DFLASH_NODE            name of this node: `host.name` of what it sends                  the host's
OTEL_DFLASH_SESSION         session directory to join; set by ``run`` and by ``start()``     a new one
OTEL_DFLASH_SHM             where session directories live; must be a tmpfs                  /dev/shm
OTEL_DFLASH_RING_BYTES      size of a worker's ring, a power of two, 128 KiB .. 64 MiB       1 MiB
OTEL_DFLASH_AGENT           command that runs the agent, when not this interpreter           this interpreter
OTEL_DFLASH_DRAIN_MS        how often the agent drains the rings, 1 .. 10000 ms              100
OTEL_DFLASH_RECORDING_BYTES size cap of one recording, oldest part removed first, >= 1 MiB   2 GiB
OTEL_DFLASH_METRIC_MS       interval of metric points, >= 100 ms                             10000
OTEL_DFLASH_METRIC_AGE_S    no metric point that is older is sent: less than the receiver's  2505600
                            out-of-order window, else it refuses whole requests
OTEL_DFLASH_EXIT_MS         how long the agent may flush after the last trainer's end        1200
OTEL_DFLASH_KEEP            traces sent whatever the sampler says: slow, error, or slow,error  none
OTEL_DFLASH_OTLP_HEADERS_FILE  file with OTLP headers, read by the agent only                none
==========================  ===============================================================  ==================
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

SESSION_VARIABLE = "OTEL_DFLASH_SESSION"
AGENT_VARIABLE = "OTEL_DFLASH_AGENT"
DIRECTORY_VARIABLE = "OTEL_DFLASH_DIR"
RUN_ID_VARIABLE = "OTEL_DFLASH_RUN_ID"
NODE_VARIABLE = "OTEL_DFLASH_NODE"
SHM_VARIABLE = "OTEL_DFLASH_SHM"
KEEP_VARIABLE = "OTEL_DFLASH_KEEP"
METRIC_AGE_VARIABLE = "OTEL_DFLASH_METRIC_AGE_S"
HEADERS_FILE_VARIABLE = "OTEL_DFLASH_OTLP_HEADERS_FILE"
GRPC_TARGETS = ("unix:", "dns:")
"""How an endpoint begins that gRPC alone understands."""
_DIGITS_MAX = 20  # Python refuses to convert thousands of them
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")  # of torchrun, srun, mpirun


class ConfigError(ValueError):
    """A setting or argument that cannot work. Raised at set-up only; the text says what, the value, and the remedy."""


def is_disabled() -> bool:
    """Return whether the environment turns telemetry off. OTEL_SDK_DISABLED knows only ``true``, as the SDK does."""
    ours = os.environ.get("OTEL_DFLASH_DISABLED", "").strip().lower()
    return ours in ("true", "1", "yes", "on") or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def check_no_user(name: str, endpoint: str) -> None:
    """Check that an endpoint has no user and password in it: every user of a host reads command lines, and the trainer its environment.

    Raises:
        ConfigError: It has; the text does not show them.
    """
    if "@" in endpoint and not endpoint.startswith(GRPC_TARGETS):  # anywhere: a / in a password ends the host before its @
        raise ConfigError(
            f"{name} holds a user or a password, which others can read there; leave out all up to the @, and put "
            f"authorization=Basic BASE64 (of user:password) into the file that {HEADERS_FILE_VARIABLE} names"
        )


def integer(name: str, default: int, low: int, high: int) -> int:
    """Return the integer in environment variable `name`, or `default` when it is unset.

    Raises:
        ConfigError: Not an integer, or outside low..high.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS_MAX or not low <= int(text) <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {text[:100]!r}; unset it for {default}")
    return int(text)


def ring_bytes() -> int:
    """Return the size of a new ring file in bytes.

    Raises:
        ConfigError: Not a power of two from 128 KiB to 64 MiB.
    """
    size = integer("OTEL_DFLASH_RING_BYTES", 1 << 20, 1 << 17, 1 << 26)
    if size & (size - 1):
        raise ConfigError(f"OTEL_DFLASH_RING_BYTES must be a power of two, got {size}; try {1 << size.bit_length()}")
    return size


def run_id(text: str) -> str:
    """Return `text` when it can name a run.

    Raises:
        ConfigError: Empty, too long, or with characters that a path or a label cannot hold.
    """
    if not isinstance(text, str) or not RUN_ID.fullmatch(text):
        fitting = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{text}").strip("-._")[:64] or "run-1"
        raise ConfigError(f"a run id is 1 to 64 letters, digits, '.', '_' or '-', got {text!r}; try {fitting!r}")
    return text


def node_name() -> str:
    """Return this node's name, which is its telemetry's `host.name`: OTEL_DFLASH_NODE, else the host's.

    Raises:
        ConfigError: OTEL_DFLASH_NODE cannot name a node.
    """
    chosen = os.environ.get(NODE_VARIABLE)
    if chosen and not RUN_ID.fullmatch(chosen):
        raise ConfigError(f"{NODE_VARIABLE} is 1 to 64 letters, digits, '.', '_' or '-', got {chosen!r}; unset it for the host's name")
    return chosen or os.uname().nodename


def is_rank() -> bool:
    """Return whether a launcher started this process as one of a node's ranks."""
    return any(name in os.environ for name in LOCAL_RANK_VARIABLES)


def recordings_directory() -> Path:
    """Return the directory that holds the recordings, absolute.

    Raises:
        ConfigError: It is relative to a working directory that was removed.
    """
    directory = Path(os.environ.get(DIRECTORY_VARIABLE) or "dflash-runs")
    try:
        return directory.absolute()
    except FileNotFoundError:
        raise ConfigError(f"the working directory was removed; go to one that exists, or set {DIRECTORY_VARIABLE}") from None


class AgentConfig(NamedTuple):
    """Settings of the agent process."""

    drain_interval_s: float
    """Seconds between two drains of all rings."""
    recording_bytes: int
    """Size cap of the recording."""
    metric_interval_ns: int
    """Recorded time between two points of a series."""
    metric_age_ns_max: int
    """No point of a series that is older is sent."""
    exit_timeout_s: float
    """Seconds the sinks may take to flush once the last trainer process is gone."""

    @classmethod
    def from_environment(cls) -> AgentConfig:
        """Read the agent's settings.

        Raises:
            ConfigError: A variable is not an integer in its range.
        """
        return cls(
            drain_interval_s=integer("OTEL_DFLASH_DRAIN_MS", 100, 1, 10_000) / 1e3,
            recording_bytes=integer("OTEL_DFLASH_RECORDING_BYTES", 2 << 30, 1 << 20, 1 << 50),
            metric_interval_ns=integer("OTEL_DFLASH_METRIC_MS", 10_000, 100, 3_600_000) * 1_000_000,
            metric_age_ns_max=integer(METRIC_AGE_VARIABLE, 29 * 86_400, 60, 1 << 32) * 1_000_000_000,
            exit_timeout_s=integer("OTEL_DFLASH_EXIT_MS", 1200, 0, 3_600_000) / 1e3,
        )
