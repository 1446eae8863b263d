"""A session: one run on one node. Its directory is where trainer processes and the agent meet.

It lies in a tmpfs (``/dev/shm/otel-dflash-<uid>/<run>-<id>/``, 0700) and holds::

    session.json              Session's fields: run id, recording directory, the clock anchor
    control                   one word, the capture detail; a page that every process maps
    ring-<pid>-<n>            a worker's ring, or a link to /proc/<pid>/fd/<n> where the tmpfs is full
    process-<pid>-<start>     an empty file for each process that may write; the agent ends when all are gone
    agent.lock                held by the agent of the session
    ended                     the agent takes nothing any more: who comes now must not write

Standard library only; every process may use it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import stat
import time
from _blake2 import blake2b  # hashlib would load OpenSSL
from pathlib import Path
from typing import Final, NamedTuple

from otel_dflash import config
from otel_dflash.config import ConfigError

SESSION_FILE: Final = "session.json"
CONTROL_FILE: Final = "control"
LOCK_FILE: Final = "agent.lock"
ENDED_FILE: Final = "ended"
NODE_FILE: Final = "node"  # in a recording: the name of the node that makes it ...
DELIVERY_FILE: Final = "delivery.json"  # ... and what its agent says at its end
CONTROL_BYTES: Final = 4096
PROBE_BYTES: Final = 4096
ABANDONED_AGE_S: Final = 60.0
RANK_WAIT_S: Final = 5.0  # from the recording of a node to its session it is milliseconds
AGENT_EXIT_INCOMPLETE: Final = 4  # the disk that had no room for the recording may have none for a file that says so

DETAIL_PHASES: Final = 0  # capture everything: what a fresh page of zeros says
DETAIL_STEPS: Final = 1
DETAIL_OFF: Final = 2


class Session(NamedTuple):
    """A session as its session.json says."""

    path: Path
    run_id: str
    node: str
    recording: Path
    anchor_wall_ns: int
    anchor_mono_ns: int
    pid_namespace: str = ""
    """Where the agent looks for pids."""


class RecordingExistsError(ConfigError):
    """This node has a recording of that run."""

    def __init__(self, recording: Path) -> None:
        """Say which, and the remedy."""
        super().__init__(f"recording {recording} exists; choose another run id, or remove it")
        self.recording = recording


def process_start(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot, None when it is gone. With the pid it names a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def create_session(run_id: str | None = None, directory: Path | None = None) -> Session:
    """Create the session directory and the recording's directory.

    Args:
        run_id: The run's name; default OTEL_DFLASH_RUN_ID, else made from the time and four random bytes of the kernel.
        directory: Where recordings lie; default OTEL_DFLASH_DIR, else ./dflash-runs.

    Raises:
        RecordingExistsError: This node has recorded a run of that id, or records it now.
        ConfigError: No directory can be written, or the run id or the node's name cannot be one.
    """
    suffix = os.urandom(4).hex()  # not `random`: a seeded run's stream must not move
    run_id = config.run_id(run_id or os.environ.get(config.RUN_ID_VARIABLE) or _default_run_id(suffix))
    node = config.node_name()
    recording = _create_recording(directory.absolute() if directory else config.recordings_directory(), run_id, node, suffix)
    try:
        return _create_in_tmpfs(f"{run_id}-{suffix}", Session(Path(), run_id, node, recording, *_anchor(), _pid_namespace()))
    except ConfigError:
        remove_directory(recording)
        raise


def create_or_join(run_id: str | None = None, directory: Path | None = None) -> tuple[Session, bool]:
    """Do as `create_session` and return True with it; in a rank whose node's session another rank made, return that and False.

    Raises:
        ConfigError: As create_session.
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
    # The commands of a batch script have one parent too, and the variables of a rank: each is a run of its own.
    return create_session(_run_id_of_now(os.urandom(4).hex()), directory), True


def _await_session(recording: Path) -> Session | None:
    """Return the session that another rank records there, as soon as that serves it; None when it has ended, or none does in time."""
    deadline = time.monotonic() + RANK_WAIT_S
    while time.monotonic() < deadline and not (recording / DELIVERY_FILE).exists():
        for path in (path for base in base_directories() for path in base.glob("*/")):
            try:
                session = open_session(path)
            except ConfigError:
                continue
            if session.recording == recording and living_processes(session) and not (path / ENDED_FILE).exists():
                return session
        time.sleep(0.01)
    return None


def open_session(path: Path) -> Session:
    """Read a session that exists.

    Raises:
        ConfigError: There is none, or it belongs to another user.
    """
    try:
        check_private(path)
        fields = json.loads((path / SESSION_FILE).read_text())
        anchor = fields["anchor_wall_ns"], fields["anchor_mono_ns"]
        return Session(path, fields["run_id"], fields["node"], Path(fields["recording"]), *anchor, fields["pid_namespace"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no session at {path} ({error}); unset {config.SESSION_VARIABLE} to start a new one") from None


def register_process(session: Session) -> Path:
    """Say that this process may write to the session. Remove the file to leave early.

    Raises:
        OSError: The session is gone or ends just now, or its agent cannot see this process.
    """
    if session.pid_namespace != _pid_namespace():
        raise OSError("the agent of this session runs in another PID namespace; call start() or `otel-dflash run` in this one")
    pid = os.getpid()
    path = session.path / f"process-{pid}-{process_start(pid)}"
    path.touch(mode=0o600)
    if (session.path / ENDED_FILE).exists() or not (session.path / SESSION_FILE).exists():
        path.unlink(missing_ok=True)
        raise OSError(f"the session {session.path} has ended; unset {config.SESSION_VARIABLE} to start a new one")
    return path


def end_session(session: Session) -> bool:
    """Let nobody join any more; return False, and let them, when somebody just did. One of the two sees the other's file."""
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
    """Return the pids of registered processes that live."""
    alive = []
    for path in session.path.glob("process-*"):
        pid, _, start = path.name.removeprefix("process-").partition("-")
        if pid.isdecimal() and start.isdecimal() and process_start(int(pid)) == int(start):
            alive.append(int(pid))
    return alive


def map_control(session: Session) -> memoryview:
    """Return the control page as words; word 0 is the capture detail. A page of zeros when it cannot be mapped."""
    try:
        with open(session.path / CONTROL_FILE, "r+b") as file:
            page = mmap.mmap(file.fileno(), CONTROL_BYTES)
    except (OSError, ValueError):
        page = mmap.mmap(-1, CONTROL_BYTES)
    return memoryview(page).cast("Q")


def running_sessions() -> list[Session]:
    """Return this user's sessions that somebody may write to."""
    found = []
    for path in (path for base in base_directories() for path in sorted(base.glob("*/"))):
        try:
            session = open_session(path)
        except ConfigError:
            continue
        if living_processes(session):
            found.append(session)
    return found


def abandoned_sessions() -> list[Session]:
    """Return this user's sessions that no process writes to any more and that no agent ended: it was killed with the trainer.

    One that is younger than a minute may still be about to begin.
    """
    return [session for base in base_directories() for path in base.glob("*/") if (session := _abandoned(path)) is not None]


def _abandoned(path: Path) -> Session | None:
    try:
        session = open_session(path)
        age_s = time.time() - (path / SESSION_FILE).stat().st_mtime
        if age_s < ABANDONED_AGE_S or living_processes(session):
            return None
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (ConfigError, OSError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    finally:
        os.close(lock)
    return session


def check_private(directory: Path) -> None:
    """Raise PermissionError when others could have written to a directory: places such as /dev/shm are open to every user."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "belongs to another user or is open to others", str(directory))


def remove_session(session: Session) -> None:
    """Remove the directory of a session that ended; session.json late, so that what is cut short can be done again.

    The mark goes after it: at no time is there the one without the other, which would let somebody join.
    """
    for path in session.path.glob("*"):
        if path.name not in (SESSION_FILE, ENDED_FILE):
            remove_directory(path) if path.is_dir() else path.unlink(missing_ok=True)
    (session.path / SESSION_FILE).unlink(missing_ok=True)
    remove_directory(session.path)


def remove_directory(path: Path) -> None:
    """Remove a directory and what is in it, as far as that is possible."""
    import shutil  # here: a trainer that joins a session removes nothing, and loading it takes milliseconds

    shutil.rmtree(path, ignore_errors=True)


def _default_run_id(suffix: str) -> str:
    """Return a run id of the time and `suffix`; in a rank, of its launcher's start and identity: then all ranks of a node have the same."""
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


def _create_recording(base: Path, run_id: str, node: str, suffix: str) -> Path:
    """Create the directory of this node's recording and return it: `<run>`, or `<run>@<node>` where another node of the run has that.

    It is made beside its place and renamed, so that whoever finds it finds its node's name in it, on a shared file system too.
    """
    draft = base / f".{run_id}-{suffix}"
    places = (base / run_id, base / f"{run_id}@{re.sub(r'[^A-Za-z0-9._-]', '-', node)}")
    try:
        draft.mkdir(parents=True)
        (draft / NODE_FILE).write_bytes(node.encode().ljust(PROBE_BYTES))  # so that a full disk is seen here
        (draft / NODE_FILE).write_bytes(node.encode())
        for place in places:
            try:
                return draft.rename(place)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            if _node_of(place) in (node, None):
                break
    except OSError as error:
        remove_directory(draft)
        reason = f"cannot create the recording {places[0]}: {error.strerror}"
        raise ConfigError(f"{reason}; set {config.DIRECTORY_VARIABLE} to a writable directory") from None
    remove_directory(draft)
    raise RecordingExistsError(place)


def _node_of(recording: Path) -> str | None:
    try:
        return (recording / NODE_FILE).read_bytes().decode(errors="replace")
    except OSError:
        return None


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
    places = [chosen] if chosen else ["/dev/shm", os.environ.get("TMPDIR") or "/tmp"]  # elsewhere than in a tmpfs rings are memfds
    return [Path(place) / f"otel-dflash-{os.getuid()}" for place in places]


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _write_private(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _create_in_tmpfs(name: str, session: Session) -> Session:
    """Create the session's private directory in the first place that has room for it; return the session with its path.

    Raises:
        ConfigError: No place has.
    """
    reasons = []
    for base in base_directories():
        path = base / name
        try:
            base.mkdir(mode=0o700, exist_ok=True)
            check_private(base)
            base.chmod(0o700)  # a umask that takes the owner's rights must not spoil it for every later run
            path.mkdir(mode=0o700)
            _write_private(path / CONTROL_FILE, bytes(CONTROL_BYTES))
            fields = {**session._asdict(), "path": str(path), "recording": str(session.recording)}
            _write_private(path / SESSION_FILE, json.dumps(fields).encode())
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
            remove_directory(path)
            continue
        return session._replace(path=path)
    raise ConfigError(f"no session directory ({'; '.join(reasons)}); set {config.SHM_VARIABLE} to a tmpfs that you can write")
