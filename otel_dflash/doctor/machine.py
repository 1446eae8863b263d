"""What a run needs from this machine: shared memory for rings, a disk for recordings, an agent that
starts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from otel_dflash import config
from otel_dflash.config import ConfigError
from otel_dflash.doctor.finding import Finding, Status, ok, warning, wrong
from otel_dflash.launch import agent_command
from otel_dflash.ring import file_system
from otel_dflash.session import base_directories
from otel_dflash.trainer.writer import python as writer
from otel_dflash.version import __version__

WORKERS_MIN: Final = 16  # with less room than for these, a small pipeline's rings leave the tmpfs
AGENT_S: Final = 10.0
_MIB: Final = 1 << 20
_DISTRIBUTIONS: Final = (
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    "grpcio",
    "numpy",
    "torch",
    "wandb",
    "nvidia-ml-py",
)


def check() -> Iterator[Finding]:
    """Yield a finding for each of them.

    Raises:
        ConfigError: A setting cannot work.
    """
    if variable := config.disabled_by():
        yield warning("telemetry", f"is off: {variable} is set; unset it to record runs")
    yield ok("versions", _versions())
    kind = "pure Python" if Path(writer.__file__).suffix == ".py" else "native"
    yield ok("writer", f"{kind} (a phase costs a few clock reads)")
    yield _agent()
    yield from _memory()
    yield _recordings()


def _versions() -> str:
    found = [f"otel-dflash {__version__}", f"python {platform.python_version()}"]
    for name in _DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _agent() -> Finding:
    """Run the command that start() would run, with --help."""
    try:
        command = agent_command()
    except ConfigError as error:
        return wrong("agent command", str(error))
    shown = shlex.join(command)
    try:
        result = subprocess.run(
            [*command, "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=AGENT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return wrong(
            "agent command",
            f"`{shown}` does not answer within {AGENT_S:g} s; run it by hand, fix {config.AGENT_VARIABLE}",
        )
    except OSError as error:
        return wrong(
            "agent command", f"`{shown}` cannot be run ({error.strerror}); fix {config.AGENT_VARIABLE}"
        )
    if result.returncode:
        printed = result.stdout.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        return wrong(
            "agent command",
            f"`{shown}` ends with exit code {result.returncode} ({printed[0]}); fix {config.AGENT_VARIABLE}",
        )
    return ok("agent command", shown)


def _memory() -> Iterator[Finding]:
    """Yield a finding for each place for sessions, up to the first that can be used."""
    ring_bytes = config.ring_bytes()
    remedy = f"set {config.SHM_VARIABLE} to a tmpfs that you can write"
    bases = base_directories()
    for base in bases:
        fault = fault_of(base)
        if fault:
            last = base == bases[-1]
            yield Finding(
                Status.WRONG if last else Status.WARNING,
                "shared memory",
                f"{fault}{'; ' + remedy if last else ''}",
            )
            continue
        free_bytes = _free_bytes(base.parent)
        workers = free_bytes // ring_bytes
        text = f"{base.parent}: {_shown(free_bytes)} free, room for {workers} workers of {_shown(ring_bytes)}"
        if (
            file_system(os.fsencode(base.parent.resolve()), Path("/proc/self/mounts").read_bytes())
            != b"tmpfs"
        ):
            yield warning(
                "shared memory",
                f"{base.parent} is not a tmpfs: rings live in the processes alone and die with them; "
                f"{remedy}",
            )
        elif workers < WORKERS_MIN:
            yield warning(
                "shared memory",
                f"{text}; more rings live in the processes alone: free some, or docker run --shm-size=1g",
            )
        else:
            yield ok("shared memory", text)
        break
    yield from _foreign(bases[0])


def fault_of(base: Path) -> str:
    """Return why sessions cannot be created in `base`, '' when they can."""
    place = base.parent
    if not place.is_dir():
        return f"{place} does not exist"
    try:
        status = base.lstat()
    except FileNotFoundError:
        return (
            ""
            if os.access(place, os.W_OK | os.X_OK)
            else f"{place} cannot be written by {_user(os.getuid())}"
        )
    except OSError as error:
        return f"{base} cannot be examined ({error.strerror})"
    if status.st_uid != os.getuid():
        return f"{base} belongs to {_user(status.st_uid)}, and only its owner or root can remove it"
    if not base.is_dir() or base.is_symlink() or status.st_mode & 0o077:
        command = f"chmod 700 {shlex.quote(str(base))}"
        return f"{base} is not a directory or is open to others: remove it, or {command}"
    return ""


def _foreign(base: Path) -> Iterator[Finding]:
    """Yield a warning about other users' session directories: they may be what fills the memory."""
    owners = []
    for path in base.parent.glob("otel-dflash-*"):
        try:
            uid = path.lstat().st_uid
        except OSError:
            continue
        if uid != os.getuid():
            owners.append(f"{path} ({_user(uid)})")
    if owners:
        yield warning(
            "other users",
            (
                f"other users have sessions here: {', '.join(sorted(owners))}; if their runs have "
                "ended, ask them"
            ),
        )


def _recordings() -> Finding:
    directory = config.recordings_directory()
    limit_bytes = config.AgentConfig.from_environment().recording_bytes
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return wrong(
            "recordings",
            (
                f"{directory} cannot be written; set {config.DIRECTORY_VARIABLE} to a directory that you "
                "can write"
            ),
        )
    free_bytes = shutil.disk_usage(place).free
    text = f"{directory}: {_shown(free_bytes)} free, a run takes up to {_shown(limit_bytes)}"
    if free_bytes < limit_bytes:
        return warning(
            "recordings",
            (
                f"{text}; set {config.DIRECTORY_VARIABLE} to a larger disk, or "
                "OTEL_DFLASH_RECORDING_BYTES to less"
            ),
        )
    return ok("recordings", text)


def _free_bytes(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def _shown(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count / 1024:.3g} KiB"


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
