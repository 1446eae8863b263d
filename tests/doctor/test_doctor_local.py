"""`otel-dflash doctor --local`: this machine's places, agents and versions; and the command's exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import otel_dflash
from otel_dflash.doctor import agents, gpu, machine
from otel_dflash.doctor.finding import Status
from otel_dflash.recording.frames import FrameKind
from otel_dflash.recording.run_info import RunInfo, create_recording
from otel_dflash.recording.writer import RecordingWriter
from otel_dflash.session import LOCK_FILE, Session, register_process
from tests.doctor.doctoring import alone, closed_port, run_doctor
from tests.running import Running, poll

LINE = re.compile(r"  (ok|warn|WRONG|-) +(\S+(?: \S+)*?)  +(?:\d[\d.]* ms  )?(.*)")
SMALL = """
import os, subprocess, sys
mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", os.environ["OTEL_DFLASH_SHM"]], capture_output=True, text=True)
if mount.returncode:
    sys.exit(f"cannot mount: {mount.stderr.strip()}")
from otel_dflash.cli.main import main
sys.exit(main(["doctor", "--local"]))
"""
OTHERS = """
import json, os, pwd, subprocess, sys
from pathlib import Path
from tests.doctor.test_doctor_local import local
places = Path(sys.argv[1])
def plant(name):
    (places / name).mkdir(mode=0o700)
    try:
        os.chown(places / name, 12345, 12345)
        return "user 12345"
    except OSError:  # not root, but in a user namespace that knows this one user
        mount = subprocess.run(["mount", "--rbind", "/usr", places / name], capture_output=True, text=True)
    if mount.returncode:
        sys.exit(f"cannot mount: {mount.stderr.strip()}")
    return f"user {pwd.getpwuid((places / name).stat().st_uid).pw_name}"
owner = plant("otel-dflash-12345")
before = local()
plant("otel-dflash-0")
print(json.dumps([owner, before, local()]))
"""


def lines(out: str) -> dict[str, str]:
    """Return "STATUS text" by check; the last of several with one name."""
    return {
        match[2]: f"{match[1]} {match[3]}" for line in out.splitlines() if (match := LINE.fullmatch(line))
    }


def local(**variables: str) -> dict[str, str]:
    """Return the same of what is checked in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return {
            line.check: f"{line.status.value} {line.text}"
            for part in (machine, agents)
            for line in part.check()
        }


def test_a_machine_that_is_right(places: Path, tmp_path: Path) -> None:
    code, out, err = run_doctor(tmp_path, "--local")
    assert (code, err) == (0, "")
    found = lines(out)
    assert list(found) == [
        "versions",
        "writer",
        "agent command",
        "shared memory",
        "recordings",
        "agents",
        "engines",
        "stack",
        "NVML",
    ]
    assert found["versions"].startswith(
        f"ok otel-dflash {otel_dflash.__version__}, python {sys.version.split()[0]}, opentelemetry-sdk "
    )
    assert found["writer"] == "ok pure Python (a phase costs a few clock reads)"
    assert found["agent command"].startswith(f"ok {sys.executable} ")
    assert re.fullmatch(
        rf"ok {places}: [\d.]+ [GM]iB free, room for \d+ workers of 1 MiB", found["shared memory"]
    )
    assert re.fullmatch(
        rf"ok {tmp_path}/runs: [\d.]+ [GM]iB free, a run takes up to 2 GiB", found["recordings"]
    )
    assert found["agents"] == "ok no run is active"
    assert found["stack"] == "- not started here by `otel-dflash stack up`"
    assert out.endswith("\nnothing is wrong here; the path was not checked\n")


def test_the_exit_code(places: Path, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{closed_port()}"
    code, out, err = run_doctor(tmp_path, "--endpoint", endpoint)
    assert (code, err, out.splitlines()[-1]) == (1, "", "1 WRONG: see above")
    assert re.search(r"(?m)^  WRONG  TCP connect +\d+\.\d ms  nothing listens at ", out)
    assert run_doctor(tmp_path, "--endpoint", "ftp://x")[::2] == (
        2,
        "otel-dflash: OTEL_EXPORTER_OTLP_ENDPOINT is not an endpoint that OTLP over gRPC can use, got "
        "'ftp://x'; "
        "try http://localhost:4317 or https://collector.example:4317\n",
    )
    assert run_doctor(tmp_path, "--endpoint", endpoint, "--jaeger", "localhost:port") == (
        2,
        "",
        "otel-dflash: --jaeger must be the URL of an HTTP API, got 'http://localhost:port'; try http://localhost:16686\n",
    )
    code, _, err = run_doctor(tmp_path, "--local", OTEL_DFLASH_RING_BYTES="1")
    assert (code, err) == (
        2,
        (
            "otel-dflash: OTEL_DFLASH_RING_BYTES must be an integer from 131072 to 67108864, got '1'; "
            "unset it for 1048576\n"
        ),
    )


@pytest.mark.parametrize("variable", ["OTEL_DFLASH_DISABLED", "OTEL_SDK_DISABLED"])
def test_telemetry_that_is_turned_off(variable: str, places: Path) -> None:
    found = local(**{variable: "true"})["telemetry"]
    assert found == f"warn is off: {variable} is set; unset it to record runs"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "/nowhere/otel-dflash",
            (
                "WRONG OTEL_DFLASH_AGENT is not a command that can be run: '/nowhere/otel-dflash'; set it to a "
                "path such as /opt/venv/bin/otel-dflash"
            ),
        ),
        (
            "sh -c 'echo no numpy here; exit 3'",
            (
                "WRONG `sh -c 'echo no numpy here; exit 3' agent` ends with exit code 3 (no numpy here); "
                "fix OTEL_DFLASH_AGENT"
            ),
        ),
    ],
)
def test_an_agent_that_cannot_be_started(places: Path, command: str, said: str) -> None:
    assert local(OTEL_DFLASH_AGENT=command)["agent command"] == said


def test_a_place_for_sessions_that_is_not_there_or_open_to_others(places: Path) -> None:
    remedy = "set OTEL_DFLASH_SHM to a tmpfs that you can write"
    assert local(OTEL_DFLASH_SHM="/nowhere")["shared memory"] == f"WRONG /nowhere does not exist; {remedy}"
    base = places / f"otel-dflash-{os.getuid()}"
    base.mkdir()
    base.chmod(0o755)
    assert local()["shared memory"] == (
        f"WRONG {base} is not a directory or is open to others: remove it, or chmod 700 {base}; {remedy}"
    )


def test_directories_of_other_users(places: Path) -> None:
    """Root gives them away; whoever is not sees one of root's in the place of each."""
    result = alone(
        "--mount", OTHERS, str(places), OTEL_DFLASH_SHM=str(places), OTEL_DFLASH_DIR=f"{places}/runs"
    )
    assert result.stderr == ""
    owner, before, after = json.loads(result.stdout)
    assert before["shared memory"].startswith("ok ")
    assert before["other users"] == (
        f"warn other users have sessions here: {places}/otel-dflash-12345 ({owner}); if their runs "
        "have ended, ask them"
    )
    assert after["shared memory"] == (
        f"WRONG {places}/otel-dflash-0 belongs to {owner}, and only its owner or root can remove it; "
        "set OTEL_DFLASH_SHM to a tmpfs that you can write"
    )


def test_a_place_that_is_no_tmpfs(places: Path, tmp_path: Path) -> None:
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
    ).stdout
    found = local(OTEL_DFLASH_SHM=str(tmp_path))["shared memory"]
    assert found.startswith(
        "ok" if kind == "tmpfs\n" else f"warn {tmp_path} is not a tmpfs: rings live in the processes alone"
    )


def test_a_small_tmpfs(tmp_path: Path) -> None:
    mounted = tmp_path / "shm"
    mounted.mkdir()
    result = alone("--mount", SMALL, OTEL_DFLASH_SHM=str(mounted), OTEL_DFLASH_DIR=str(tmp_path))
    assert lines(result.stdout)["shared memory"] == (
        f"warn {mounted}: 3 MiB free, room for 3 workers of 1 MiB; "
        "more rings live in the processes alone: free some, or docker run --shm-size=1g"
    )


def test_recordings_without_a_place_or_with_little_room(places: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert local(OTEL_DFLASH_DIR=str(tmp_path / "file"))["recordings"] == (
        f"WRONG {tmp_path}/file cannot be written; set OTEL_DFLASH_DIR to a directory that you can write"
    )
    found = local(
        OTEL_DFLASH_DIR=str(tmp_path), OTEL_DFLASH_RECORDING_BYTES=str(shutil.disk_usage(tmp_path).total * 2)
    )["recordings"]
    assert found.startswith("warn ")
    assert found.endswith("; set OTEL_DFLASH_DIR to a larger disk, or OTEL_DFLASH_RECORDING_BYTES to less")


@pytest.mark.parametrize(
    ("variable", "is_ours"),
    [(name, is_ours) for name in ("OTEL_DFLASH_DIR", "OTEL_DFLASH_SESSION") for is_ours in (True, False)],
)
def test_a_fault_of_another_session_is_a_warning(
    variable: str, is_ours: bool, places: Path, tmp_path: Path
) -> None:
    with Running(tmp_path) as running:
        own = {"OTEL_DFLASH_DIR": running.recording.parent, "OTEL_DFLASH_SESSION": running.session.path}
        text = (
            f"run {running.session.run_id} has no agent: its rings fill up; `otel-dflash runs` starts one that "
            f"only records; see {running.log}"
        )
        found = local(**{variable: str(own[variable] if is_ours else tmp_path / "elsewhere")})["agents"]
        assert found == (f"WRONG {text}" if is_ours else f"warn another session's {text}")


def test_a_living_a_stopped_and_a_dead_agent(places: Path, tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        run = running.session.run_id
        remedy = "`otel-dflash runs` starts one that only records"
        dead = f"WRONG run {run} has no agent: its rings fill up; {remedy}; see {running.log}"
        assert local()["agents"] == dead
        agent = running.start_agent()
        poll(lambda: list(running.recording.glob("segment-*.rec")))
        assert local()["agents"] == f"ok run {run}: agent {agent.pid} records, sends nothing"
        agent.send_signal(signal.SIGSTOP)
        segment = next(iter(running.recording.glob("segment-*.rec")))
        poll(lambda: Path(f"/proc/{agent.pid}/stat").read_text().split()[2] == "T")
        os.utime(segment, ns=(0, segment.stat().st_mtime_ns - 60_000_000_000))  # as if a minute had passed
        assert re.fullmatch(
            rf"WRONG run {run}: agent {agent.pid} is stuck: it records nothing for 6\d s; "
            rf"kill -9 it \(its supervisor starts another\), see {running.log}",
            local()["agents"],
        )
        agent.kill()
        agent.wait()
        assert local()["agents"] == dead


@pytest.mark.parametrize(("age_s", "status"), [(3, "ok"), (60, "warn")])
def test_how_far_a_sink_is_behind(places: Path, session: Session, age_s: int, status: str) -> None:
    register_process(session)
    create_recording(session.recording, RunInfo("run-1", "here", 0, 0, 0, "0"))
    writer = RecordingWriter(session.recording, 1 << 20, 0)
    old_ns = time.monotonic_ns() - age_s * 1_000_000_000
    for time_ns in (old_ns - 10**9, old_ns):
        assert writer.append(FrameKind.SAMPLES, 0, 0, 0, b"", time_ns)
    first_unsent = writer.next_number - 1
    writer.close()
    (session.recording / "cursor-spans-otlp.json").write_text(json.dumps({"position": first_unsent}))
    (session.recording / "cursor-metrics-otlp.json").write_text(json.dumps({"position": first_unsent + 1}))
    with (session.path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # this test is the agent
        found = local()["agents"]
    passed_s = (time.monotonic_ns() - old_ns) / 1e9
    (behind_s,) = re.findall(r"metrics-otlp 0\.0 s, spans-otlp (\d+\.\d) s", found)
    assert age_s <= float(behind_s) <= passed_s + 0.05
    shown = f"metrics-otlp 0.0 s, spans-otlp {behind_s} s"
    if status == "ok":
        assert found == f"ok run run-1: agent {os.getpid()} records, not yet sent: {shown}"
    else:
        log = session.recording / "agent.log"
        assert found == (
            f"warn run run-1: agent {os.getpid()} records, but spans-otlp is late ({shown}): nothing is lost; why it waits is in {log}"
        )


def test_a_run_whose_trainer_and_agent_were_killed(places: Path, session: Session) -> None:
    old_s = time.time() - 120
    os.utime(session.path / "session.json", (old_s, old_s))
    (line, _) = agents.check()
    assert line == (
        Status.WARNING,
        "agents",
        "trainer and agent were both killed: run-1; `otel-dflash runs` saves what their rings hold",
        None,
    )


NVML = """
import time
class NVMLError(Exception): pass
def nvmlInit(): {}
def nvmlDeviceGetCount(): return 8
def nvmlSystemGetDriverVersion(): return "570.1"
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (NVML.format("pass"), (Status.OK, "NVML", "8 GPUs, driver 570.1", None)),
        (
            NVML.format("raise NVMLError('Driver Not Loaded')"),
            (Status.UNKNOWN, "NVML", "no NVIDIA driver here: no GPU can be read (Driver Not Loaded)", None),
        ),
        (
            NVML.format("time.sleep(8)"),
            (
                Status.WARNING,
                "NVML",
                "no GPU can be read: nvml did not answer within 5 s: process N hangs in nvmlInit and is left alone (the driver hangs, see dmesg; killing that process can freeze a GPU)",
                None,
            ),
        ),
        (
            "raise ModuleNotFoundError",
            (
                Status.UNKNOWN,
                "NVML",
                "not asked: nvidia-ml-py is not installed, and nothing needs it yet",
                None,
            ),
        ),
    ],
)
def test_nvml_that_answers_fails_hangs_or_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[object, ...]
) -> None:
    (tmp_path / "pynvml.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = gpu.Nvml().check(5 if "sleep" in source else 30)
    assert found._replace(text=re.sub(r"process \d+", "process N", found.text)) == expected
