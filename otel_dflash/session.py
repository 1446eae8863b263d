"""A session: one run on one node. Its directory is where trainer processes and the agent meet.

It lies in a tmpfs (``/dev/shm/otel-dflash-<uid>/<run>-<id>/``, 0700) and holds::

    session.json              Session's fields: run id, recording directory, the clock anchor
    control                   a page of words that every process maps: the capture detail, then how many steps
                              were not recorded because their worker got no ring, by pid modulo their number
    ring-<pid>-<n>            a worker's ring, or a link to /proc/<pid>/fd/<n> where the tmpfs is full
    process-<pid>-<start>     an empty file for each process that may write; the agent ends when all are gone
    agent.lock                held by the agent of the session
    supervisor.lock           held by the agent's supervisor
    ended                     the agent reads nothing any more: a process that joins now must not write

Standard library only; every process may use it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import stat
import time
from _blake2 import blake2b  # hashlib would load OpenSSL
from pathlib import Path
from typing import Final, NamedTuple

from otel_dflash import config
from otel_dflash.config import ConfigError
from otel_dflash.new_recording import RecordingExistsError, create_recording_directory

SESSION_FILE: Final = "session.json"
CONTROL_FILE: Final = "control"
LOCK_FILE: Final = "agent.lock"
SUPERVISOR_LOCK_FILE: Final = "supervisor.lock"
ENDED_FILE: Final = "ended"
DELIVERY_FILE: Final = "delivery.json"  # in a recording: what its agent has delivered
CONTROL_BYTES: Final = 4096
RANK_WAIT_S: Final = 5.0  # a node's session follows its recording within milliseconds
# An exit code, because a disk that is too full for the recording has no room for a file that reports it.
AGENT_EXIT_INCOMPLETE: Final = 4
AGENT_START_S: Final = 5.0  # an agent that starts at all has its lock by then

DETAIL_PHASES: Final = 0  # capture everything: what a fresh page of zeros says
DETAIL_STEPS: Final = 1
DETAIL_OFF: Final = 2


class Session(NamedTuple):
    """A session, as session.json holds it."""

    path: Path
    run_id: str
    node: str
    recording: Path
    anchor_wall_ns: int
    anchor_mono_ns: int
    pid_namespace: str = ""
    """The namespace in which the agent looks up pids."""


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone. Pid and start together
    identify a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def create_session(run_id: str | None = None, directory: Path | None = None) -> Session:
    """Create the session directory and the recording's directory.

    Args:
        run_id: The run's name; default OTEL_DFLASH_RUN_ID, else the time and four random bytes from the
            kernel.
        directory: Where recordings lie; default OTEL_DFLASH_DIR, else ./dflash-runs.

    Raises:
        RecordingExistsError: This node has recorded a run of that id, or is recording it now.
        ConfigError: No directory can be written, or the run id or the node's name is not valid.
    """
    suffix = os.urandom(4).hex()  # not `random`: a seeded run's stream must not move
    run_id = config.run_id(run_id or os.environ.get(config.RUN_ID_VARIABLE) or _default_run_id(suffix))
    node = config.node_name()
    recording = create_recording_directory(
        directory.absolute() if directory else config.recordings_directory(), run_id, node, suffix
    )
    try:
        return _create_in_tmpfs(
            f"{run_id}-{suffix}", Session(Path(), run_id, node, recording, *_anchor(), pid_namespace())
        )
    except ConfigError:
        remove_directory(recording)
        raise


def create_or_join(run_id: str | None = None, directory: Path | None = None) -> tuple[Session, bool]:
    """Create a session and return it with True. In a rank of which another rank of the node has created the
    session, return that session with False.

    Raises:
        ConfigError: No session can be created; see create_session.
    """
    try:
        return create_session(run_id, directory), True
    except RecordingExistsError as error:
        if not config.is_rank():
            raise
        session = _await_session(error.recording)
        if session is not None:
            return session, False
        if run_id or os.environ.get(config.RUN_ID_VARIABLE):
            raise
    # The commands of a batch script share a parent and the variables of a rank too, but each is its own run.
    return create_session(_run_id_of_now(os.urandom(4).hex()), directory), True


def _await_session(recording: Path) -> Session | None:
    """Return the session that another rank records there, once that rank is in it; None when it has ended, or
    does not appear in time."""
    deadline = time.monotonic() + RANK_WAIT_S
    while time.monotonic() < deadline and not (recording / DELIVERY_FILE).exists():
        for path in (path for base in base_directories() for path in base.glob("*/")):
            try:
                session = open_session(path)
            except ConfigError:
                continue
            if (
                session.recording == recording
                and living_processes(session)
                and not (path / ENDED_FILE).exists()
            ):
                return session
        time.sleep(0.01)
    return None


def open_session(path: Path) -> Session:
    """Read a session that exists.

    Raises:
        ConfigError: There is no session at `path`, or it belongs to another user.
    """
    try:
        check_private(path)
        fields = json.loads((path / SESSION_FILE).read_text())
        anchor = fields["anchor_wall_ns"], fields["anchor_mono_ns"]
        return Session(
            path,
            fields["run_id"],
            fields["node"],
            Path(fields["recording"]),
            *anchor,
            fields["pid_namespace"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no session at {path} ({error}); unset {config.SESSION_VARIABLE} to start a new one"
        ) from None


def register_process(session: Session) -> Path:
    """Register this process as a writer of the session and return the file that does so; removing it leaves
    the session.

    Raises:
        OSError: The session is gone or just ending, or its agent cannot see this process.
    """
    if session.pid_namespace != pid_namespace():
        raise OSError(
            "the agent of this session runs in another PID namespace; call start() or `otel-dflash "
            "run` in this one"
        )
    pid = os.getpid()
    path = session.path / f"process-{pid}-{process_start(pid)}"
    path.touch(mode=0o600)
    if (session.path / ENDED_FILE).exists() or not (session.path / SESSION_FILE).exists():
        path.unlink(missing_ok=True)
        raise OSError(
            f"the session {session.path} has ended; unset {config.SESSION_VARIABLE} to start a new one"
        )
    return path


def end_session(session: Session) -> bool:
    """Close the session to new processes and return True; leave it open and return False when one has just
    joined. Whichever comes second sees the other's file."""
    mark = session.path / ENDED_FILE
    try:
        mark.touch(mode=0o600)
    except OSError:  # the directory is gone: nobody can join
        return True
    if living_processes(session):
        mark.unlink(missing_ok=True)
        return False
    return True


def living_processes(session: Session) -> list[int]:
    """Return the pids of the registered processes that are alive."""
    alive = []
    for path in session.path.glob("process-*"):
        pid, _, start = path.name.removeprefix("process-").partition("-")
        if pid.isdecimal() and start.isdecimal() and process_start(int(pid)) == int(start):
            alive.append(int(pid))
    return alive


def open_lock(path: Path) -> int:
    """Open a lock file of a session and return its descriptor.

    Raises:
        OSError: The session is gone.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def is_held(lock: Path) -> bool:
    """Return whether a process holds a lock.

    Takes it for a moment, so whoever wants it tries more than once.
    """
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def pid_namespace() -> str:
    """Return the PID namespace of this process, "" if unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def map_control(session: Session) -> memoryview:
    """Return the control page as words; word 0 is the capture detail. When it cannot be mapped, the page is a
    private one of zeros."""
    try:
        with open(session.path / CONTROL_FILE, "r+b") as file:
            page = mmap.mmap(file.fileno(), CONTROL_BYTES)
    except (OSError, ValueError):
        page = mmap.mmap(-1, CONTROL_BYTES)
    return memoryview(page).cast("Q")


def count_unrecorded_step(control: memoryview) -> None:
    """Count a step whose worker got no ring. Never raises or locks; the page has its memory already."""
    word = 1 + os.getpid() % (len(control) - 1)
    control[word] += 1


def unrecorded_steps(control: memoryview) -> int:
    """Return how many steps of all processes were counted so."""
    return sum(control[1:])


def check_private(directory: Path) -> None:
    """Check that only this user can have written to a directory: places such as /dev/shm are open to all.

    Raises:
        PermissionError: The directory belongs to another user, or others may open it.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "belongs to another user or is open to others", str(directory))


def remove_session(session: Session) -> None:
    """Remove the directory of a session that has ended.

    session.json goes late, so that an interrupted removal can be repeated. The mark `ended` goes last:
    without it, session.json would let a process join.
    """
    for path in session.path.glob("*"):
        if path.name not in (SESSION_FILE, ENDED_FILE):
            remove_directory(path) if path.is_dir() else path.unlink(missing_ok=True)
    (session.path / SESSION_FILE).unlink(missing_ok=True)
    remove_directory(session.path)


def remove_directory(path: Path) -> None:
    """Remove a directory and all that can be removed of its content."""
    import shutil  # here: a trainer that joins a session removes nothing, and loading it takes milliseconds

    shutil.rmtree(path, ignore_errors=True)


def _default_run_id(suffix: str) -> str:
    """Return a run id made of the time and `suffix`; in a rank, of its launcher's start time and identity, so
    that all ranks of a node get the same one."""
    launcher = os.getppid()
    start_ticks = process_start(launcher)
    if not config.is_rank() or start_ticks is None:
        return _run_id_of_now(suffix)
    boot_s = int(Path("/proc/stat").read_bytes().partition(b"\nbtime ")[2].split()[0])
    started = time.localtime(boot_s + start_ticks // os.sysconf("SC_CLK_TCK"))
    restarts = [os.environ.get(name) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    identity = f"{config.node_name()} {launcher} {start_ticks} {restarts}".encode()
    return f"{time.strftime('%Y%m%d-%H%M%S', started)}-{blake2b(identity, digest_size=4).hexdigest()}"


def _run_id_of_now(suffix: str) -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{suffix}"


def _anchor() -> tuple[int, int]:
    """Return (wall, monotonic) ns of one moment: the closest of a few readings."""
    best = None
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, wall, (before + after) // 2)
    assert best
    return best[1], best[2]


def base_directories() -> list[Path]:
    """Return where this user's session directories may lie, the best first."""
    chosen = os.environ.get(config.SHM_VARIABLE)
    # outside a tmpfs, rings are memfds
    places = [chosen] if chosen else ["/dev/shm", os.environ.get("TMPDIR") or "/tmp"]
    return [Path(place) / f"otel-dflash-{os.getuid()}" for place in places]


def _write_private(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _create_in_tmpfs(name: str, session: Session) -> Session:
    """Create the session's private directory in the first place that has room for it; return the session with
    its path.

    Raises:
        ConfigError: No place can hold it.
    """
    reasons = []
    for base in base_directories():
        path = base / name
        try:
            base.mkdir(mode=0o700, exist_ok=True)
            check_private(base)
            base.chmod(0o700)  # a umask without the owner's rights must not break every later run
            path.mkdir(mode=0o700)
            _write_private(path / CONTROL_FILE, bytes(CONTROL_BYTES))
            fields = {**session._asdict(), "path": str(path), "recording": str(session.recording)}
            _write_private(path / SESSION_FILE, json.dumps(fields).encode())
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
            remove_directory(path)
            continue
        return session._replace(path=path)
    raise ConfigError(
        f"no session directory ({'; '.join(reasons)}); set {config.SHM_VARIABLE} to a tmpfs that you "
        "can write"
    )
