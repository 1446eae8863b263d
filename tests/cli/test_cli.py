"""The command line: texts, exit codes, and one line for a user's mistake."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import otel_dflash
from otel_dflash.recording.run_info import FORMAT
from otel_dflash.recording.writer import RecordingWriter
from tests.metrics.planted import PlantedRing

Command = Callable[..., tuple[int, str, str]]

RUN_INFO = {"host": "node-1", "anchor_wall_ns": 0, "anchor_mono_ns": 0, "version": "0.1.0", "format": FORMAT}


def without_settings() -> dict[str, str]:
    """Return this process's environment without settings, for a Python that imports what this one does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def cli(tmp_path: Path) -> Command:
    """Run `otel-dflash` in an empty directory; return exit code, stdout, stderr."""

    def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
        environment = {**without_settings(), "COLUMNS": "80", **variables}
        command = [sys.executable, "-m", "otel_dflash", *arguments]
        result = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        return result.returncode, result.stdout, result.stderr

    return run


def make_recording(base: Path, run: str, created_ns: int = 0) -> Path:
    """Make an empty recording."""
    directory = base / run
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"run": run, "created_ns": created_ns, **RUN_INFO}))
    os.utime(directory / "run.json", ns=(created_ns, created_ns))
    return directory


HELP = """\
Usage: otel-dflash [OPTIONS] [COMMAND] [ARGS]...

  See why the GPUs of a DFlash training run are idle, at no cost to the run.

  The trainer writes a few words into memory; an agent beside it records them,
  and sends OpenTelemetry traces and metrics to the endpoint that the
  OTEL_EXPORTER_OTLP_* variables set.

Options:
  --version   Show the versions in use and exit.
  -h, --help  Show this message and exit.

Commands:
  run      Run a training command and record it.
  demo     Train a small drafter and see it recorded.
  runs     List recordings.
  summary  Show where the time of a run went.
  replay   Send a recording to an OTLP endpoint.
  stack    Start a collector, Jaeger and Prometheus on this host.
  doctor   Prove that telemetry arrives, or find out why not.
  detail   Change what an active run captures.

  Start here:  otel-dflash run -- python train.py
"""


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ()])
def test_help_lists_the_commands_in_the_order_of_use(arguments: tuple[str, ...], cli: Command) -> None:
    assert cli(*arguments) == (0, HELP, "")


@pytest.mark.parametrize(
    "command", ["run", "demo", "runs", "summary", "replay", "stack", "doctor", "detail", "agent"]
)
def test_every_command_has_help(command: str, cli: Command) -> None:
    code, out, err = cli(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: otel-dflash {command} ")


def test_help_of_run_shows_the_separator_and_examples(cli: Command) -> None:
    out = cli("run", "--help")[1]
    assert out.startswith("Usage: otel-dflash run [OPTIONS] -- COMMAND...\n")
    assert "    otel-dflash run -- python train.py --lr 3e-4\n" in out


def test_the_versions(cli: Command) -> None:
    sdk, numpy = (importlib.metadata.version(name) for name in ("opentelemetry-sdk", "numpy"))
    line = (
        f"otel-dflash {otel_dflash.__version__} (Python {platform.python_version()}, opentelemetry-sdk {sdk}, "
        f"numpy {numpy})\n"
    )
    assert cli("--version") == (0, line, "")
    assert len(line) <= 80


def test_the_list_of_runs_loads_nothing_that_it_does_not_show(tmp_path: Path) -> None:
    record_step(make_recording(tmp_path / "dflash-runs", "night-7"))
    program = """
import sys
from otel_dflash.cli.main import main
code = main(["runs"])
other = ("numpy", "opentelemetry", "importlib.metadata", "subprocess", "hashlib", "otel_dflash.cli.run")
sys.exit(f"{code} {[name for name in (*other, 'otel_dflash.stack.engines') if name in sys.modules]}")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=without_settings(), capture_output=True, text=True
    )
    assert result.stderr == "0 []\n"
    assert "night-7" in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"]])
def test_a_quick_command_loads_nothing_heavy(arguments: list[str]) -> None:
    program = f"""
import sys
from otel_dflash.cli.main import main
code = main({arguments})
heavy = [name for name in ("numpy", "opentelemetry", "rich", "grpc", "torch", "psutil") if name in sys.modules]
sys.exit(f"loaded {{heavy}}" if heavy else code)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_run_loads_nothing_heavy_before_the_command_starts(cli: Command) -> None:
    program = (
        "import os; print([line.split('/')[-1] for line in open(f'/proc/{os.getppid()}/maps') if 'numpy' "
        "in line or 'grpc' in line])"
    )
    assert cli("run", "--quiet", "--", sys.executable, "-c", program) == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian",), "No such command 'trian' (see: otel-dflash --help)"),
        (
            ("run", "--qiet", "--", "true"),
            "No such option '--qiet'. Did you mean '--quiet'? (see: otel-dflash run --help)",
        ),
        (
            ("run", "--protocol", "http", "--", "true"),
            (
                "Invalid value for '--protocol': 'http' is not one of 'grpc', 'http/protobuf' (see: "
                "otel-dflash run --help)"
            ),
        ),
        (
            ("run", "--run-id", "a b", "--", "true"),
            "a run id is 1 to 64 letters, digits, '.', '_' or '-', got 'a b'; try 'a-b'",
        ),
        (
            ("replay", "--endpoint", "http://localhost:4317"),
            "Missing argument 'RUN' (see: otel-dflash replay --help)",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, cli: Command
) -> None:
    assert cli(*arguments) == (2, "", f"otel-dflash: {message}\n")


def test_no_recordings(cli: Command, tmp_path: Path) -> None:
    expected = (
        f"otel-dflash: no recordings in {tmp_path}/dflash-runs; make one: otel-dflash run -- python "
        "train.py, or point --dir at them\n"
    )
    assert cli("summary") == (2, "", expected)
    assert cli("replay", "latest", "--endpoint", "http://localhost:4317") == (2, "", expected)


def test_runs_of_an_empty_directory(cli: Command, tmp_path: Path) -> None:
    assert cli("runs") == (
        0,
        f"no recordings in {tmp_path}/dflash-runs; record one: otel-dflash run -- python train.py\n",
        "",
    )


def test_runs_lists_what_is_there(cli: Command, tmp_path: Path) -> None:
    make_recording(tmp_path / "elsewhere", "night-7")
    code, out, err = cli("runs", "--dir", "elsewhere")
    assert (code, err) == (0, "")
    assert "night-7" in out


def test_unknown_run_names_the_newest(cli: Command, tmp_path: Path) -> None:
    make_recording(tmp_path / "dflash-runs", "b", 1_000_000_000)
    make_recording(tmp_path / "dflash-runs", "a", 2_000_000_000)
    expected = (
        f"otel-dflash: no run 'c' in {tmp_path}/dflash-runs; the newest is a, `otel-dflash runs` lists all\n"
    )
    assert cli("summary", "c") == (2, "", expected)


def test_ambiguous_beginning_of_a_run_id(cli: Command, tmp_path: Path) -> None:
    for name in ("night-1", "night-2", "day-1"):
        make_recording(tmp_path / "dflash-runs", name)
    assert cli("summary", "night") == (
        2,
        "",
        "otel-dflash: 2 runs begin with 'night': night-1, night-2; give more of the id\n",
    )


def test_path_that_is_no_recording(cli: Command, tmp_path: Path) -> None:
    code, out, err = cli("summary", str(tmp_path))
    assert (code, out) == (1, "")
    assert err == (
        f"otel-dflash: {tmp_path} is not a recording: it has no run.json; `otel-dflash runs` lists "
        "recordings\n"
    )


def test_a_run_is_found_by_id_beginning_path_and_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from otel_dflash.recording.directory import find_recording

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_DFLASH_DIR", str(tmp_path / "runs"))
    newest = make_recording(tmp_path / "runs", "night", 2_000_000_000)
    older = make_recording(tmp_path / "runs", "night-7", 1_000_000_000)
    assert find_recording("latest", None, pytest.fail) == newest
    assert find_recording("night", None, pytest.fail) == newest, (
        "an id in full wins over the beginning of another"
    )
    assert find_recording("night-", None, pytest.fail) == older
    assert find_recording(str(older), None, pytest.fail) == older
    assert find_recording("night-7", Path("runs"), pytest.fail) == older


def record_step(directory: Path) -> Path:
    """Let a worker of an empty recording end a step."""
    ring = PlantedRing(1, "target", 0)
    ring.step(0, 1_000_000_000)
    writer = RecordingWriter(directory, 1 << 30)
    for frame in (ring.names_frame(), ring.flush()):
        writer.append(frame.kind, frame.ring, frame.first, frame.count, frame.payload, frame.time_ns)
    writer.close()
    return directory


def test_latest_is_the_newest_recording_with_records(cli: Command, tmp_path: Path) -> None:
    base = tmp_path / "dflash-runs"
    for second, run in enumerate(("older", "real", "empty-1", "empty-2"), 1):
        make_recording(base, run, second * 1_000_000_000)
    for run in ("older", "real"):
        record_step(base / run)
    RecordingWriter(base / "empty-1", 1 << 30).close()
    code, out, err = cli("summary")
    assert (code, err) == (0, "otel-dflash: 2 newer runs have no records; showing real\n")
    assert "real on node-1" in out
    shutil.rmtree(base / "empty-2")
    assert cli("summary")[2] == "otel-dflash: empty-1 is newer, but has no records; showing real\n"
    shutil.rmtree(base / "empty-1")
    assert cli("summary")[::2] == (0, "")


def test_latest_is_the_newest_recording_where_none_has_records(cli: Command, tmp_path: Path) -> None:
    for second, run in enumerate(("older", "newer"), 1):
        make_recording(tmp_path / "dflash-runs", run, second * 1_000_000_000)
    code, out, err = cli("summary")
    assert (code, err) == (0, "")
    assert "newer on node-1" in out


@pytest.mark.parametrize("arguments", ["summary", "runs", "doctor --local", "--help", "--version"])
def test_a_reader_that_leaves_early_is_no_error(arguments: str, cli: Command, tmp_path: Path) -> None:
    record_step(make_recording(tmp_path / "dflash-runs", "night-7"))
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "otel_dflash", *arguments.split()],
        env=without_settings(),
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (cli(*arguments.split())[0], b"")


@pytest.mark.parametrize("arguments", ["runs", "--help", "--version"])
@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [(">&-", 0, b""), (">/dev/full", 1, b"otel-dflash: [Errno 28] No space left on device\n")],
)
def test_a_stdout_that_is_closed_or_full_leaves_no_traceback(
    redirection: str, code: int, said: bytes, arguments: str, tmp_path: Path
) -> None:
    result = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m otel_dflash {arguments} {redirection}"],
        env=without_settings(),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (code, said)


def test_replay_without_an_endpoint(cli: Command, tmp_path: Path) -> None:
    make_recording(tmp_path / "dflash-runs", "a")
    expected = (
        "otel-dflash: no endpoint is set; give --endpoint http://localhost:4317, or set "
        "OTEL_EXPORTER_OTLP_ENDPOINT\n"
    )
    assert cli("replay", "a") == (2, "", expected)


def test_replay_to_a_bad_endpoint(cli: Command, tmp_path: Path) -> None:
    make_recording(tmp_path / "dflash-runs", "a")
    code, out, err = cli("replay", "a", "--endpoint", "ftp://localhost")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("otel-dflash: OTEL_EXPORTER_OTLP_ENDPOINT is not an endpoint")


def test_demo_without_torch_says_what_to_install(tmp_path: Path) -> None:
    program = """
import importlib.util, sys
find_spec = importlib.util.find_spec
sys.modules["torch"] = None  # as in an environment without it
from otel_dflash.cli.main import main
sys.exit(main(["demo"]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "otel-dflash: the demo needs torch; install: pip install torch\n"
