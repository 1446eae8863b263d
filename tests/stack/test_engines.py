"""Builds: one at a time, whole or not at all, once, and with one line for what is missing. Real ones, by
Go."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from otel_dflash.session import process_start
from otel_dflash.stack.engines import ENGINES, EngineError, build, collector_directory, find, program_path
from tests.processes import poll, read_line
from tests.stack.tiny_engine import SOURCE, tiny

DEADLINE_S = 60
TINY = Path(__file__).with_name("tiny_engine.py")

Begin = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and a tiny engine to build in it."""
    if shutil.which("go") is None:
        message = "engines are built with Go, which is not on PATH; install it (https://go.dev/dl)"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "manifest.go").write_text(SOURCE.format("first"))
    return tmp_path


@pytest.fixture
def begin(shelf: Path) -> Iterator[Begin]:
    """Start a process that builds the tiny engine."""
    begun: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        begun.append(
            subprocess.Popen(
                [sys.executable, TINY, shelf], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
        )
        return begun[-1]

    yield start
    (shelf / "go-on").touch()
    for process in begun:
        process.kill()
        process.communicate()
    poll(lambda: not builders(shelf))


def begin_and_hold(shelf: Path, begin: Begin) -> subprocess.Popen[bytes]:
    """Return a build that stands still while Go compiles."""
    (shelf / "hold").touch()
    process = begin()
    assert read_line(process) == b"building tiny 1.0, once: about 1 minute on two cores\n"
    poll(lambda: builders(shelf))
    return process


def builders(shelf: Path) -> list[int]:
    """Return the pids of Go's processes that live."""
    file = shelf / "tools"
    return [pid for pid in map(int, file.read_text().split()) if process_start(pid)] if file.exists() else []


def builds(shelf: Path) -> int:
    return len((shelf / "builds").read_text().splitlines())


def left(shelf: Path) -> list[str]:
    """Return what the cache holds besides the locks."""
    return sorted(
        path.name
        for path in (shelf / "cache" / "otel-dflash" / "engines").iterdir()
        if path.suffix != ".lock"
    )


def output(program: Path) -> str:
    return subprocess.run([program], capture_output=True, text=True, timeout=DEADLINE_S, check=True).stderr


def test_an_engine_is_built_once_and_again_when_its_manifest_changes(shelf: Path) -> None:
    said: list[str] = []
    assert find(tiny(shelf)) is None
    first = build(tiny(shelf), said.append)
    assert build(tiny(shelf), said.append) == first == find(tiny(shelf))
    (shelf / "manifest.go").write_text(SOURCE.format("second"))
    assert find(tiny(shelf)) is None
    second = build(tiny(shelf), said.append)
    assert (output(first), output(second)) == ("first\n", "second\n")
    assert builds(shelf) == 2
    assert said == ["building tiny 1.0, once: about 1 minute on two cores"] * 2
    assert left(shelf) == sorted([first.parent.name, second.parent.name])


def test_an_engine_of_which_a_part_was_removed_is_built_again(shelf: Path) -> None:
    program = build(tiny(shelf))
    program.rename(program.with_name("something else"))
    assert find(tiny(shelf)) is None
    assert build(tiny(shelf)) == program
    assert output(program) == "first\n"
    assert [path.name for path in program.parent.iterdir()] == ["tiny"]


def test_of_two_builds_at_once_one_waits_for_the_other(shelf: Path, begin: Begin) -> None:
    first = begin_and_hold(shelf, begin)
    second = begin()
    assert read_line(second) == b"tiny is already being built; waiting\n"
    (shelf / "go-on").touch()
    results = [process.communicate(timeout=DEADLINE_S) for process in (first, second)]
    program = find(tiny(shelf))
    assert results == [(f"{program}\n".encode(), b"")] * 2
    assert builds(shelf) == 1
    assert program
    assert output(program) == "first\n"


def test_a_killed_build_leaves_nothing_that_is_taken_for_complete(shelf: Path, begin: Begin) -> None:
    killed = begin_and_hold(shelf, begin)
    killed.kill()
    killed.wait(DEADLINE_S)
    assert find(tiny(shelf)) is None
    assert builders(shelf)
    second = begin()
    # Go, whom nobody told, still writes there
    assert read_line(second) == b"tiny is already being built; waiting\n"
    (shelf / "go-on").touch()
    out, err = second.communicate(timeout=DEADLINE_S)
    program = find(tiny(shelf))
    assert program
    assert (out.decode().splitlines(), err) == (
        ["building tiny 1.0, once: about 1 minute on two cores", str(program)],
        b"",
    )
    assert builds(shelf) == 2
    assert left(shelf) == [program.parent.name]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupt_ends_the_builders_too(
    number: signal.Signals, code: int, shelf: Path, begin: Begin
) -> None:
    interrupted = begin_and_hold(shelf, begin)
    interrupted.send_signal(number)
    assert (interrupted.wait(DEADLINE_S), interrupted.communicate()) == (code, (b"", b""))
    poll(lambda: not builders(shelf))
    assert left(shelf) == []


def test_what_go_says_is_the_end_of_the_message(shelf: Path) -> None:
    (shelf / "manifest.go").write_text("package main\n\nfunc main() { nothing() }\n")
    with pytest.raises(EngineError) as caught:
        build(tiny(shelf))
    assert str(caught.value) == (
        "`go build -ldflags ...` failed with exit code 1:\n  # tiny\n  ./main.go:3:15: undefined: nothing"
    )
    assert left(shelf) == []


FULL = """
mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", os.environ["XDG_CACHE_HOME"]], capture_output=True, text=True)
if mount.returncode:
    sys.exit(f"cannot mount: {mount.stderr.strip()}")
status = tiny_engine.main()
print(sorted(path.suffix for path in Path(os.environ["XDG_CACHE_HOME"]).glob("otel-dflash/engines/*")))
sys.exit(status)
"""


def test_a_full_disk_is_one_line_with_the_remedy(shelf: Path) -> None:
    (shelf / "cache").mkdir()
    program = (
        f"import os, subprocess, sys\nfrom pathlib import Path\nfrom tests.stack import tiny_engine\n{FULL}"
    )
    own_user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *own_user, "--mount", sys.executable, "-c", program, str(shelf)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TINY.parents[2]), *filter(None, sys.path)]),
    }
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if result.returncode and ("cannot mount" in result.stderr or result.stderr.startswith("unshare:")):
        pytest.skip(f"this machine allows no tmpfs of our own: {result.stderr.strip()}")
    assert (result.returncode, result.stderr) == (
        1,
        f"no space left for the engines in {shelf}/cache/otel-dflash/engines or Go's caches; a first "
        "build takes about 12 GiB: "
        "free some space, or set XDG_CACHE_HOME, GOCACHE and GOMODCACHE to another disk\n",
    )
    assert result.stdout.splitlines()[-1] == "['.lock']"


def test_every_module_of_the_collector_is_of_its_release() -> None:
    manifest = yaml.safe_load((collector_directory() / ENGINES["otelcol"].manifest).read_text())
    parts = [
        part["gomod"].split()
        for kind in ("extensions", "receivers", "processors", "exporters")
        for part in manifest[kind]
    ]
    release = ENGINES["otelcol"].version
    assert {version for _, version in parts} == {f"v{release}"}
    assert manifest["dist"]["version"] == release
    assert ENGINES["otelcol"].module.endswith(f"@v{release}")
    assert {line.split()[0] for line in manifest["replaces"]} & {module for module, _ in parts} == set(), (
        "only what a part needs"
    )


def cli(*arguments: str, **variables: str) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [sys.executable, "-m", "otel_dflash", "stack", "build", *arguments]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    return result.returncode, result.stdout, result.stderr


def test_without_go_one_line_says_what_to_install(tmp_path: Path) -> None:
    assert cli("jaeger", PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)) == (
        1,
        "",
        "otel-dflash: jaeger is built with 'go', which is not on PATH; install Go >= 1.24.6 (https://go.dev/dl)\n",
    )


@pytest.mark.parametrize(
    ("version", "toolchain", "said"),
    [
        ("go1.26.6", "local", "go1.26.6 (GOTOOLCHAIN=local)"),
        ("go1.26rc1", "go1.26rc1", "go1.26rc1 (GOTOOLCHAIN=go1.26rc1)"),
        ("go1.20.14", "", "go1.20.14 (GOTOOLCHAIN=unknown to it)"),
        ("go1.26.6", "auto", None),
        ("go1.21.0", "go1.21.0+auto", None),
        ("go1.26.7", "local", None),
        ("go1.27rc1 X:nocoverageredesign", "local", None),
        ("devel +0123456789", "local", None),
    ],
)
def test_a_go_that_is_too_old_and_fetches_no_newer_one_is_one_line(
    version: str, toolchain: str, said: str | None, tmp_path: Path
) -> None:
    """A stand-in says its version, and fails at anything else."""
    (tmp_path / "go").write_text(
        f'#!/bin/sh\ntest "$*" = "env GOVERSION GOTOOLCHAIN" && printf "%s\\n" "{version}" "{toolchain}"\n'
    )
    (tmp_path / "go").chmod(0o755)
    code, out, err = cli("prometheus", PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert code == 1
    if said is None:
        assert "`go mod init ...` failed" in err
        return
    remedy = "install a newer one (https://go.dev/dl), or let Go >= 1.21 fetch it: GOTOOLCHAIN=auto"
    assert (out, err) == (
        "",
        f"otel-dflash: prometheus is built with Go >= 1.26.7, and the one on PATH is {said}; {remedy}\n",
    )


@pytest.mark.parametrize("name", [name for name, engine in ENGINES.items() if engine.go])
def test_the_oldest_go_is_what_the_modules_of_an_engine_name(name: str) -> None:
    """Of the main module and the collector's parts: Go keeps what they say beside what a build has
    fetched."""
    engine = ENGINES[name]
    modules = [engine.module]
    if engine.manifest:
        manifest = yaml.safe_load((collector_directory() / engine.manifest).read_text())
        kinds = ("extensions", "receivers", "processors", "exporters")
        modules += ["@".join(part["gomod"].split()) for kind in kinds for part in manifest[kind]]
    oldest = [re.findall(r"^go (\S+)", go_mod(module), re.MULTILINE)[0] for module in modules]
    assert max(oldest, key=lambda version: [int(number) for number in version.split(".")]) == engine.go


def go_mod(package: str) -> str:
    """Return the go.mod of a package's module; a machine that got its engines from elsewhere fetches that one
    file."""
    if shutil.which("go") is None:
        pytest.skip("go is not on PATH")
    path, version = package.split("@")
    modules = [path, *map(str, Path(path).parents)][:-1]
    asked = subprocess.run(
        ["go", "env", "GOMODCACHE"], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    kept = [
        Path(asked.stdout.strip(), "cache/download", module, "@v", f"{version}.mod") for module in modules
    ]
    for file in kept:
        if file.is_file():
            return file.read_text()
    for module in modules:
        command = ["go", "list", "-m", "-f", "{{.GoMod}}", f"{module}@{version}"]
        fetched = subprocess.run(
            command, cwd="/", capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        if fetched.returncode == 0:
            return Path(fetched.stdout.strip()).read_text()
    pytest.skip(f"{package} is not here and cannot be fetched: {fetched.stderr.strip()}")


def test_without_network_one_line_says_so(shelf: Path) -> None:
    code, out, err = cli(
        "otelcol", GOPROXY="http://127.0.0.1:1", GOMODCACHE=str(shelf / "modules"), GOFLAGS="-modcacherw"
    )
    assert (code, out) == (1, "building otelcol 0.161.0, once: about 6 minutes on two cores\n")
    beginning = (
        "otel-dflash: `go install go.opentelemetry.io/collector/cmd/builder@v0.161.0 ...` cannot "
        "fetch modules; "
        "check the network, or set GOPROXY to a mirror that answers: "
    )
    assert err.startswith(beginning)
    assert err.count("\n") == 1
    assert "connection refused" in err
    assert left(shelf) == []


def test_by_default_all_engines_are_built_but_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = [plant(name) for name in ("otelcol", "prometheus", "jaeger")]
    lines = [
        f"{path.parent.name.rsplit('-', 1)[0].replace('-', ' ')} is already built: {path}\n" for path in there
    ]
    assert cli(PATH=str(tmp_path)) == (0, "".join(lines), "")


def test_kafka_is_built_for_the_tests_alone_and_left_out_without_maven(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.stack.kafka_build"]
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        "kafka left out, and the tests of the variant with a broker: install Maven >= 3.8 (mvn is not on PATH)\n",
        "",
    )


def plant(name: str) -> Path:
    """Put empty files where the built engine's programs would be; return its path."""
    path = program_path(ENGINES[name])
    path.parent.mkdir(parents=True)
    for program in ENGINES[name].programs:
        (path.parent / program).touch()
    return path


def test_an_unknown_engine_is_a_usage_error() -> None:
    assert cli("jager") == (
        2,
        "",
        (
            "otel-dflash: 'jager' is not an engine; choose from otelcol, prometheus, jaeger (see: "
            "otel-dflash stack build --help)\n"
        ),
    )
