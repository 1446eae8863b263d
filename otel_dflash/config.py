"""The settings: one table, for the functions below and for docs/settings.md (`make docs` generates it).

A command-line flag wins over its ``OTEL_DFLASH_*`` variable, and the variable over the default. ``OTEL_*``
variables belong to the SDK: they are passed on, not read again or renamed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

DISABLED_VARIABLE = "OTEL_DFLASH_DISABLED"
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
AGENT_GRACE_S = 3.8
"""How long to wait for an agent beyond its own exit timeout (OTEL_DFLASH_EXIT_MS): 5 s in all by default."""
_DIGITS_MAX = 20  # Python refuses to convert thousands of them
_ON = ("true", "1", "yes", "on")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# of torchrun, srun, mpirun
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


class ConfigError(ValueError):
    """A setting or argument that cannot work. Raised at set-up only; the text says what, the value, and the
    remedy."""


class Setting(NamedTuple):
    """A variable that holds text."""

    variable: str
    meaning: str
    """One sentence or two, in markdown."""
    values: str
    """What the text may be, in markdown."""
    default: str = ""
    """The value that an unset variable stands for; "" where `meaning` says what happens instead."""
    flag: str = ""
    """The option of `otel-dflash run` that wins over the variable."""


class NumberSetting(NamedTuple):
    """A variable that holds a whole number, `low` and `high` included."""

    variable: str
    meaning: str
    unit: str
    """By (bytes), ms or s."""
    low: int
    high: int
    default: int

    def read(self) -> int:
        """Return the number in the environment, or the default when the variable is unset.

        Raises:
            ConfigError: The variable is not an integer, or is out of range.
        """
        text = os.environ.get(self.variable, "").strip()
        if not text:
            return self.default
        is_integer = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
        if not is_integer or not self.low <= int(text) <= self.high:
            raise ConfigError(
                f"{self.variable} must be an integer from {self.low} to {self.high}, got {text[:100]!r}; "
                f"unset it for {self.default}"
            )
        return int(text)


_NAME = "1 to 64 letters, digits, `.`, `_` or `-`, starting with a letter or digit"
DIRECTORY = Setting(
    DIRECTORY_VARIABLE, "The directory that holds the recordings.", "a path", "./dflash-runs", "--dir"
)
RING_BYTES = NumberSetting(
    "OTEL_DFLASH_RING_BYTES",
    "Size of a worker's ring. A power of two.",
    unit="By",
    low=1 << 17,
    high=1 << 26,
    default=1 << 20,
)
DRAIN_MS = NumberSetting(
    "OTEL_DFLASH_DRAIN_MS",
    "How often the agent drains the rings.",
    unit="ms",
    low=1,
    high=10_000,
    default=100,
)
RECORDING_BYTES = NumberSetting(
    "OTEL_DFLASH_RECORDING_BYTES",
    "Size cap of a recording. Beyond it, the oldest part is removed first.",
    unit="By",
    low=1 << 20,
    high=1 << 50,
    default=2 << 30,
)
METRIC_MS = NumberSetting(
    "OTEL_DFLASH_METRIC_MS",
    "Interval between the points of a metric series.",
    unit="ms",
    low=100,
    high=3_600_000,
    default=10_000,
)
METRIC_AGE_S = NumberSetting(
    METRIC_AGE_VARIABLE,
    "Metric points older than this are not sent. Keep it below the receiver's out-of-order window (30 days "
    "in `collector/prometheus.yaml`): beyond its window, Prometheus refuses whole requests.",
    unit="s",
    low=60,
    high=1 << 32,
    default=29 * 86_400,
)
EXIT_MS = NumberSetting(
    "OTEL_DFLASH_EXIT_MS",
    "How long the agent may keep sending after the last training process has ended.",
    unit="ms",
    low=0,
    high=3_600_000,
    default=1200,
)
SETTINGS: tuple[Setting | NumberSetting, ...] = (
    Setting(
        DISABLED_VARIABLE,
        "Turns telemetry off: every call becomes a no-op. `OTEL_SDK_DISABLED=true` does the same.",
        ", ".join(f"`{text}`" for text in (*_ON, "false")),
        "false",
    ),
    DIRECTORY,
    Setting(RUN_ID_VARIABLE, "Name of the run. Unset, it is made from the time.", _NAME, flag="--run-id"),
    Setting(
        NODE_VARIABLE,
        "Name of this node: `host.name` of its telemetry. Unset, it is the host's name.",
        _NAME,
    ),
    RECORDING_BYTES,
    RING_BYTES,
    Setting(
        SHM_VARIABLE,
        "Where session directories and rings are created. Unset, a full or missing `/dev/shm` falls back to "
        "`TMPDIR`.",
        "the path of a tmpfs",
        "/dev/shm",
    ),
    Setting(
        AGENT_VARIABLE,
        "The command that runs the agent, for a training environment without the agent's packages. Unset, it "
        "is this interpreter, or the `otel-dflash` on the `PATH`.",
        "a command, such as `/opt/venv/bin/otel-dflash`",
    ),
    DRAIN_MS,
    METRIC_MS,
    METRIC_AGE_S,
    EXIT_MS,
    Setting(
        KEEP_VARIABLE,
        "Traces to send whatever `OTEL_TRACES_SAMPLER` decides ([sampling.md](sampling.md)). Unset, none.",
        "`slow`, `error` or `slow,error`",
        flag="--keep",
    ),
    Setting(
        HEADERS_FILE_VARIABLE,
        "A file of OTLP headers that only the agent reads ([tls.md](tls.md)). Unset, none.",
        "the path of a file with one `key=value` a line",
    ),
    Setting(
        SESSION_VARIABLE,
        "The session to join. `otel-dflash run` and `start()` set it for the processes that they start; "
        "leave it alone.",
        "the path of a session directory",
    ),
)


def disabled_by() -> str | None:
    """Return the variable that turns telemetry off, None if it is on. OTEL_SDK_DISABLED knows only ``true``,
    as the SDK does."""
    for variable, words in ((DISABLED_VARIABLE, _ON), ("OTEL_SDK_DISABLED", {"true"})):
        if os.environ.get(variable, "").strip().lower() in words:
            return variable
    return None


def check_no_user(name: str, endpoint: str) -> None:
    """Check that an endpoint contains no credentials: any user of a host can read command lines, and the
    trainer can read its environment.

    Raises:
        ConfigError: The endpoint contains a user name or a password; the message does not show them.
    """
    # anywhere: a / in a password ends the host before its @
    if "@" in endpoint and not endpoint.startswith(GRPC_TARGETS):
        raise ConfigError(
            f"{name} holds a user or a password, which others can read there; leave out all up to the "
            "@, and put "
            f"authorization=Basic BASE64 (of user:password) into the file that {HEADERS_FILE_VARIABLE} names"
        )


def ring_bytes() -> int:
    """Return the size of a new ring file in bytes.

    Raises:
        ConfigError: The size is not a power of two, or is out of range.
    """
    size = RING_BYTES.read()
    if size & (size - 1):
        raise ConfigError(
            f"{RING_BYTES.variable} must be a power of two, got {size}; try {1 << size.bit_length()}"
        )
    return size


def run_id(text: str) -> str:
    """Return `text` if it can name a run.

    Raises:
        ConfigError: The text is empty, is too long, or has characters that a path or a label cannot hold.
    """
    if not isinstance(text, str) or not RUN_ID.fullmatch(text):
        fitting = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{text}").strip("-._")[:64] or "run-1"
        raise ConfigError(
            f"a run id is 1 to 64 letters, digits, '.', '_' or '-', got {text!r}; try {fitting!r}"
        )
    return text


def node_name() -> str:
    """Return this node's name, the `host.name` of its telemetry: OTEL_DFLASH_NODE, else the host's name.

    Raises:
        ConfigError: OTEL_DFLASH_NODE cannot name a node.
    """
    chosen = os.environ.get(NODE_VARIABLE)
    if chosen and not RUN_ID.fullmatch(chosen):
        raise ConfigError(
            f"{NODE_VARIABLE} is 1 to 64 letters, digits, '.', '_' or '-', got {chosen!r}; unset it for "
            "the host's name"
        )
    return chosen or os.uname().nodename


def is_rank() -> bool:
    """Return whether a launcher started this process as one of a node's ranks."""
    return any(name in os.environ for name in LOCAL_RANK_VARIABLES)


def recordings_directory() -> Path:
    """Return the directory that holds the recordings, absolute.

    Raises:
        ConfigError: The path is relative, and the working directory was removed.
    """
    directory = Path(os.environ.get(DIRECTORY_VARIABLE) or DIRECTORY.default)
    try:
        return directory.absolute()
    except FileNotFoundError:
        raise ConfigError(
            f"the working directory was removed; go to one that exists, or set {DIRECTORY_VARIABLE}"
        ) from None


class AgentConfig(NamedTuple):
    """Settings of the agent process."""

    drain_interval_s: float
    """Seconds between two drains of all rings."""
    recording_bytes: int
    """Size cap of the recording."""
    metric_interval_ns: int
    """Recorded time between two points of a series."""
    metric_age_ns_max: int
    """Points older than this are not sent."""
    exit_timeout_s: float
    """Seconds the sinks may take to flush once the last trainer process is gone."""
    record_only: bool = False
    """Whether nothing is sent; no variable sets it."""

    @classmethod
    def from_environment(cls) -> AgentConfig:
        """Read the agent's settings.

        Raises:
            ConfigError: A variable is not an integer, or is out of range.
        """
        return cls(
            drain_interval_s=DRAIN_MS.read() / 1e3,
            recording_bytes=RECORDING_BYTES.read(),
            metric_interval_ns=METRIC_MS.read() * 1_000_000,
            metric_age_ns_max=METRIC_AGE_S.read() * 1_000_000_000,
            exit_timeout_s=EXIT_MS.read() / 1e3,
        )
