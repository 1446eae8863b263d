"""Where telemetry is put at a disadvantage: streams that lead nowhere, exec, shadowed modules, sessions that
end, disks that are full."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from otel_dflash import ConfigError, config
from otel_dflash.launch import agent_command
from otel_dflash.recording.frames import FrameKind
from otel_dflash.records import Header
from otel_dflash.ring import WAITING_MAX, WAITING_MEMFDS_MAX, file_system
from otel_dflash.session import AGENT_EXIT_INCOMPLETE, Session, create_session, end_session, register_process
from tests.agent.draining import SLOTS, Draining, phases
from tests.otlp_receiver import OtlpReceiver
from tests.processes import completed, user_environment
from tests.running import poll

RUN = (sys.executable, "-m", "otel_dflash", "run")
OFF = """
import sys
{}
import otel_dflash
telemetry = otel_dflash.start()
with telemetry.worker("target", 0).step():
    print("trained")
"""
AGAIN = """
import os, sys
import otel_dflash
with otel_dflash.start().worker("target", 0).step():
    pass
if len(sys.argv) < 3:
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"])
"""
UNCOLLECTED = 100  # workers end when the garbage collector comes by
SHORT_LIVED = """
import gc, os
import otel_dflash
telemetry = otel_dflash.start()
for _ in range({}):
    with telemetry.worker("target", 0).step():
        pass
gc.collect()
session = os.environ["OTEL_DFLASH_SESSION"]
rings = [f"{{session}}/{{name}}" for name in os.listdir(session) if name.startswith("ring-")]
before = len(os.listdir("/proc/self/fd"))
for path in rings:  # as the agent does when it has taken one
    os.unlink(path)
telemetry.worker("target", 0)
print(len(rings), before, len(os.listdir("/proc/self/fd")))
"""


def trained(program: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    "stderr", ["sys.stderr = None", "sys.stderr.close()", "sys.stderr = open('/dev/full', 'w')"]
)
def test_a_warning_that_nobody_can_read_neither_raises_nor_goes_to_stdout(stderr: str, places: Path) -> None:
    code, out, _ = trained(OFF.format(stderr), OTEL_DFLASH_SESSION=str(places / "gone"))
    # Python itself exits with 120 when it cannot flush
    assert (out, code if "full" not in stderr else 0) == (
        "trained\n",
        0,
    )


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_run_without_a_stderr_leaves_stdout_and_exit_code_alone(
    options: tuple[str, ...], stderr: str, tmp_path: Path
) -> None:
    command = ("sh", "-c", f'exec "$@" {stderr}', "sh", *RUN, *options, "--", "sh", "-c", "echo mine; exit 5")
    result = subprocess.run(
        command, env=user_environment(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (5, b"mine\n")


def test_a_program_put_in_place_by_exec_has_rings_of_its_own(session: Session) -> None:
    assert trained(AGAIN, "first") == (0, "", "")
    rings = list(session.path.glob("ring-*"))
    assert len(rings) == 2
    ids = {path.read_bytes()[8 * Header.RING_ID :][:8] for path in rings}
    assert len(ids) == 2


def test_short_lived_workers_beside_no_agent_take_a_bounded_part_of_memory(session: Session) -> None:
    code, out, err = trained(
        SHORT_LIVED.format(WAITING_MAX + 2 * UNCOLLECTED), OTEL_DFLASH_RING_BYTES=str(1 << 17)
    )
    assert (code, err.count("\n")) == (0, 1)
    assert WAITING_MAX <= int(out.split()[0]) < WAITING_MAX + UNCOLLECTED
    assert "rings of workers that ended wait for the agent" in err


NO_ROOM_LATER = """
import resource, otel_dflash
telemetry = otel_dflash.start()
with telemetry.worker("target", 0).step():
    pass
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
for index in range(1, 526):
    with telemetry.worker("prefetch", index).step():
        pass
resource.setrlimit(resource.RLIMIT_FSIZE, before)
with telemetry.worker("target", 1).step():
    pass
"""


@pytest.mark.parametrize("start", [(*RUN, "--quiet"), ()])
def test_steps_of_workers_without_a_ring_are_said_and_sent_as_lost(
    start: tuple[str, ...], receiver: OtlpReceiver, tmp_path: Path
) -> None:
    environment = {
        **user_environment(tmp_path),
        **receiver.environment("grpc"),
        "OTEL_DFLASH_RUN_ID": "run-1",
        "OTEL_DFLASH_EXIT_MS": "20000",
    }
    del environment["OTEL_DFLASH_AGENT"]
    code, _, said = completed((*start, sys.executable, "-c", NO_ROOM_LATER), environment, tmp_path)
    lost = "no_ring 525 steps of workers that got no ring"
    assert code == 0
    assert said.decode().count("otel-dflash: worker prefetch 1 records nothing") == 1
    assert (f"otel-dflash: lost: {lost}\n" in said.decode()) is bool(start)
    poll((tmp_path / "runs/run-1/delivery.json").exists)
    command = (sys.executable, "-m", "otel_dflash", "summary", "run-1")
    _, summary, _ = completed(command, {**environment, "COLUMNS": "300"}, tmp_path)
    assert summary.decode().partition("\nlosses")[2].partition("\nown cost")[0] == (
        f"    {lost}\n"
        "            the tmpfs and the memory were full (df -h /dev/shm), or the agent was stopped or far behind "
        "(agent.log); create a worker once, not for each step"
    )
    (counted,) = receiver.latest(
        "dflash.telemetry.events.dropped", {"dflash.telemetry.drop.reason": "no_ring"}
    )
    assert (counted.value, counted.monotonic) == (525, True)
    batches = {
        point.attributes["dflash.worker.id"]: point.value
        for point in receiver.latest("dflash.worker.batches")
    }
    assert batches == {"0": 1, "1": 1}


def test_memfds_of_short_lived_workers_are_bounded_and_given_back(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_DFLASH_SHM", str(tmp_path))
    if file_system(os.fsencode(tmp_path), Path("/proc/self/mounts").read_bytes()) == b"tmpfs":
        monkeypatch.setenv("OTEL_DFLASH_SHM", str(Path(__file__).parent))
    session = create_session()
    code, out, err = trained(
        SHORT_LIVED.format(WAITING_MEMFDS_MAX + 2 * UNCOLLECTED), OTEL_DFLASH_SESSION=str(session.path)
    )
    rings, before, after = map(int, out.split())
    assert (code, err.count("\n")) == (0, 1)
    assert WAITING_MEMFDS_MAX <= rings < WAITING_MEMFDS_MAX + UNCOLLECTED
    assert before >= WAITING_MEMFDS_MAX
    assert after < 20


def test_a_mount_point_of_any_name_is_understood() -> None:
    mounts = (
        "disk / ext4 rw 0 0\nshm /mnt/sp\\040ace\\134\xe9 tmpfs rw 0 0\n".encode()
        + b"odd\nx /mnt/\xff\x0c\x85 tmpfs rw 0 0\n"
    )
    assert file_system("/mnt/sp ace\\\xe9/sub".encode(), mounts) == b"tmpfs"
    assert file_system(b"/mnt/\xff\x0c\x85", mounts) == b"tmpfs"
    assert file_system(b"/mnt/other", mounts) == b"ext4"


def test_nobody_joins_a_session_that_ends(session: Session) -> None:
    assert end_session(session)
    with pytest.raises(OSError, match="has ended"):
        register_process(session)
    code, out, err = trained(OFF.format(""))
    assert (code, out) == (0, "trained\n")
    assert err.startswith(f"otel-dflash: telemetry is off: the session {session.path} has ended")
    assert list(session.path.glob("process-*")) == []
    (session.path / "session.json").unlink()
    (session.path / "ended").unlink()
    with pytest.raises(OSError, match="has ended"):
        register_process(session)


def test_a_session_that_somebody_joined_meanwhile_does_not_end(session: Session) -> None:
    member = register_process(session)
    assert not end_session(session)
    assert register_process(session) == member


def test_a_process_that_the_agent_cannot_see_is_refused(session: Session) -> None:
    with pytest.raises(OSError, match="another PID namespace"):
        register_process(session._replace(pid_namespace="pid:[1]"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 has no way to say so")
def test_the_agent_does_not_import_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_DFLASH_AGENT", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("typing", "numpy", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')\n")
    result = subprocess.run(
        [*agent_command(), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_base_directory_that_an_odd_umask_spoiled_is_repaired(places: Path) -> None:
    base = places / f"otel-dflash-{os.getuid()}"
    base.mkdir(mode=0)
    create_session()
    assert base.stat().st_mode & 0o777 == 0o700


def test_a_working_directory_that_was_removed_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_DFLASH_DIR", raising=False)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="the working directory was removed"):
        config.recordings_directory()


def test_a_disk_without_room_is_said_before_the_command_starts(tmp_path: Path) -> None:
    result = subprocess.run(
        [*RUN, "--", "echo", "started"],
        env=user_environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "cannot create the recording" in result.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_recording_that_lacks_frames_is_said_at_the_end(tmp_path: Path) -> None:
    environment = user_environment(tmp_path)
    Path(environment["OTEL_DFLASH_AGENT"]).write_text(f"#!/bin/sh\nexit {AGENT_EXIT_INCOMPLETE}\n")
    command = [*RUN, "--quiet", "--", "sleep", "0.2"]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr.count("\n")) == (0, 1)
    assert "a part of the recording is missing" in result.stderr


def test_steps_that_ended_with_the_ring_full_are_not_cut_off(places: Path, tmp_path: Path) -> None:
    with Draining(tmp_path / "runs") as session:
        worker = session.worker()
        for _ in range(2):
            with worker.step():
                phases(worker, SLOTS)
        worker.close()
        session.agent.drain.poll()
        (closed,) = session.frames(FrameKind.CLOSED)
    said = json.loads(closed.payload)
    assert (said["killed"], said["open"], said["step"]) == (False, [], None)
