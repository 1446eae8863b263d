"""The engines, their versions, and how each is built from its modules into a cache.

::

    ~/.cache/otel-dflash/engines/            $XDG_CACHE_HOME when set
        jaeger-2.13.0-<recipe>/jaeger        complete when it exists: built beside it, then renamed
        jaeger-2.13.0-<recipe>.lock          held while it is being built, also by the tools that build it
        .build-jaeger-2.13.0-<recipe>-XXXX/  left by a killed build; the next build removes it

<recipe> is a hash of everything that a build reads (modules, versions, flags, the collector's manifest), so
another version has another directory, and an unchanged one is never built again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[1]
DISK_BYTES: Final = 12 << 30  # Go's module and build caches while all engines are built from scratch

_GO_BUILD: Final = ("go", "build", "-trimpath", "-ldflags", "-s -w")
_OCB: Final = "go.opentelemetry.io/collector/cmd/builder"
_JAEGER: Final = "github.com/jaegertracing/jaeger/cmd/jaeger"
_PROMETHEUS: Final = "github.com/prometheus/prometheus"

_FULL: Final = ("no space left on device", "disk quota exceeded")
_UNREACHED: Final = (
    "dial tcp",
    "no such host",
    "i/o timeout",
    "connection refused",
    "network is unreachable",
)
_FIRST_TO_FETCH: Final = [1, 21]
_ELSEWHERE: Final = ("GOOS", "GOARCH", "GOWORK")  # a user's settings that would change a build


class EngineError(Exception):
    """An engine cannot be built, found or started; the text has the value and the remedy."""


@dataclass(frozen=True)
class Workshop:
    """A directory beside the finished engines in which one is built; its subdirectory `out` becomes the
    engine."""

    directory: Path
    lock: int
    """Descriptor of the lock. The build's tools inherit it, so those of a killed build keep other builds out
    until they have ended."""

    @property
    def out(self) -> Path:
        """Return the directory for finished programs."""
        return self.directory / "out"

    def run(self, *command: str, below: str = "", **variables: str) -> None:
        """Run one step of a build. Its output is kept for the message of a failure; an interrupt ends it and
        its children.

        Raises:
            EngineError: The step failed; the text has the end of its output.
            OSError: The step could not be started, or the disk is full.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
        go = {
            "CGO_ENABLED": "0",
            "GOWORK": "off",
            "GOFLAGS": f"{os.environ.get('GOFLAGS', '')} -mod=mod".strip(),
        }
        process = subprocess.Popen(
            command,
            cwd=self.directory / below,
            env={**inherited, **go, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=(self.lock,),
            start_new_session=True,
        )
        printed = None
        try:
            printed, _ = process.communicate()
        finally:
            if printed is None:  # interrupted
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode:
            raise _failure(command, process.returncode, printed)


@dataclass(frozen=True)
class Engine:
    """One program of the stack."""

    name: str
    version: str
    """As in the names of its release and its container image."""
    image: str
    """The container image with the same version, as compose.yaml pins it."""
    programs: tuple[str, ...]
    """What a finished build contains; the first one is the engine."""
    module: str
    """The module it is built from, with the module's own version."""
    steps: Callable[[Workshop, Engine], None]
    """Builds the programs into the workshop's `out`."""
    minutes: int
    """Roughly how long a build takes on two cores with empty caches."""
    options: tuple[str, ...] = ()
    """What else a build depends on: flags, further modules."""
    manifest: str = ""
    """The file of collector/ that lists its parts."""
    go: str = ""
    """The oldest Go that its modules allow; "" when that does not matter."""


def _build_otelcol(shop: Workshop, engine: Engine) -> None:
    shutil.copy(collector_directory() / engine.manifest, shop.directory / "builder.yaml")
    shop.run("go", "install", engine.module, GOBIN=str(shop.directory))
    shop.run(str(shop.directory / "builder"), "--config", "builder.yaml", "--skip-compilation")
    shop.run(*_GO_BUILD, "-o", str(shop.out / "otelcol"), ".", below="build")


def _build_jaeger(shop: Workshop, engine: Engine) -> None:
    shop.run("go", "mod", "init", "otel_dflash/jaeger")
    shop.run("go", "get", "-tool", engine.module)
    shop.run(*_GO_BUILD, "-o", str(shop.out / "jaeger"), _JAEGER)


def _build_prometheus(shop: Workshop, engine: Engine) -> None:
    shop.run("go", "mod", "init", "otel_dflash/prometheus")
    shop.run(
        "go",
        "get",
        "-tool",
        *(f"{_PROMETHEUS}/cmd/{program}@{engine.module.split('@')[1]}" for program in engine.programs),
    )
    for program in engine.programs:
        shop.run(*_GO_BUILD, *engine.options, "-o", str(shop.out / program), f"{_PROMETHEUS}/cmd/{program}")


ENGINES: Final = {
    engine.name: engine
    for engine in (
        Engine(
            name="otelcol",
            version="0.161.0",
            image="otel/opentelemetry-collector-contrib:0.161.0",
            programs=("otelcol",),
            module=f"{_OCB}@v0.161.0",
            steps=_build_otelcol,
            minutes=6,
            manifest="builder.yaml",
            go="1.26.0",
        ),
        Engine(
            name="prometheus",
            version="3.16.0",
            image="prom/prometheus:v3.16.0",
            programs=("prometheus", "promtool"),
            module=f"{_PROMETHEUS}@v0.316.0",
            steps=_build_prometheus,
            minutes=7,
            # static targets and OTLP are all we use: half the time without service discovery
            options=(
                "-tags",
                "remove_all_sd",
            ),
            go="1.26.7",
        ),
        Engine(
            name="jaeger",
            version="2.13.0",
            image="jaegertracing/jaeger:2.13.0",
            programs=("jaeger",),
            module=f"{_JAEGER}@v1.76.0",
            steps=_build_jaeger,
            minutes=9,
            go="1.24.6",
        ),
    )
}


def collector_directory() -> Path:
    """Return the directory of the configurations: beside the package in a checkout, inside it in an installed
    wheel.

    Raises:
        EngineError: The configurations are in neither place.
    """
    for base in (PACKAGE.parent, PACKAGE):
        if (base / "collector" / "builder.yaml").is_file():
            return base / "collector"
    raise EngineError(
        f"the configurations of the engines are not installed ({PACKAGE / 'collector'}); reinstall "
        "otel-dflash"
    )


def cache_directory() -> Path:
    """Return the directory of the built engines.

    Raises:
        EngineError: The user has no home directory.
    """
    return own_directory("XDG_CACHE_HOME", ".cache") / "engines"


def own_directory(variable: str, below_home: str) -> Path:
    """Return our directory below the one that an XDG variable names, else below the home directory. As XDG
    requires, a path that is not absolute is ignored.

    Raises:
        EngineError: The user has no home directory.
    """
    given = Path(os.environ.get(variable, ""))
    try:
        return (given if given.is_absolute() else Path.home() / below_home) / "otel-dflash"
    except RuntimeError:
        raise EngineError(
            f"this user has no home directory; set {variable} to a directory that it can write"
        ) from None


def find(engine: Engine, program: str | None = None) -> Path | None:
    """Return the path of a built program, by default the engine's own; None when it is not built."""
    path = program_path(engine, program)
    return path if path.exists() else None


def program_path(engine: Engine, program: str | None = None) -> Path:
    """Return the path that a program of the engine has once it is built."""
    return _directory(engine) / (program or engine.programs[0])


def _missing_go(engine: Engine) -> str | None:
    """Return why the Go that is here cannot build the engine, with the remedy; None when it can."""
    if not engine.go:
        return None
    if shutil.which("go") is None:
        return (
            f"{engine.name} is built with 'go', which is not on PATH; install Go >= {engine.go} "
            "(https://go.dev/dl)"
        )
    return _old_go(engine)


def _old_go(engine: Engine) -> str | None:
    """Return why the Go that is here is too old for the engine; None when it is not, or may fetch a newer
    one."""
    command = ("go", "env", "GOVERSION", "GOTOOLCHAIN")
    asked = subprocess.run(
        command, cwd="/", env={**os.environ, "GOWORK": "off"}, capture_output=True, text=True, check=False
    )
    version, toolchain = (*asked.stdout.splitlines(), "", "")[:2]
    here = _numbers(version)
    # auto, path, go1.26.0+auto, ...
    fetches = here >= _FIRST_TO_FETCH and toolchain.endswith(("auto", "path"))
    if not here or here >= _numbers(engine.go) or fetches:
        return None
    return (
        f"{engine.name} is built with Go >= {engine.go}, and the one on PATH is {version} "
        f"(GOTOOLCHAIN={toolchain or 'unknown to it'}); "
        "install a newer one (https://go.dev/dl), or let Go >= 1.21 fetch it: GOTOOLCHAIN=auto"
    )


def _numbers(version: str) -> list[int]:
    """Return the numbers of a Go version such as go1.26.8, [] of another text."""
    found = re.search(r"\d+(\.\d+)+", version)
    return [int(number) for number in found[0].split(".")] if found else []


def build(engine: Engine, report: Callable[[str], object] = lambda line: None) -> Path:
    """Return the path of the engine, after building it if need be. Of two builds at once, one waits for the
    other; `report` gets a line about what takes long.

    Raises:
        EngineError: A command is missing, or a step failed; the cache is then as before.
    """
    directory = _directory(engine)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(
            directory.with_name(f"{directory.name}.lock"),
            lambda: report(f"{engine.name} is already being built; waiting"),
        ) as lock:
            # not built, or a part has been removed
            if not all((directory / program).exists() for program in engine.programs):
                if missing := _missing_go(engine):
                    raise EngineError(missing)
                minutes = f"{engine.minutes} minute{'s' if engine.minutes > 1 else ''}"
                report(f"building {engine.name} {engine.version}, once: about {minutes} on two cores")
                _build_into(engine, directory, lock)
    except OSError as error:
        raise EngineError(_disk_message(directory.parent, error)) from None
    return directory / engine.programs[0]


def _build_into(engine: Engine, directory: Path, lock: int) -> None:
    prefix = f".build-{directory.name}-"
    for left in directory.parent.glob(f"{prefix}*"):  # the lock is ours, so whoever made it is gone
        shutil.rmtree(left, ignore_errors=True)
    shop = Workshop(Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent)), lock)
    try:
        shop.out.mkdir()
        engine.steps(shop, engine)
        for program in engine.programs:
            if not (shop.out / program).exists():
                raise EngineError(f"the build of {engine.name} made no {program!r}; please report it")
        shutil.rmtree(directory, ignore_errors=True)
        shop.out.rename(directory)
    finally:
        shutil.rmtree(shop.directory, ignore_errors=True)


def _directory(engine: Engine) -> Path:
    recipe = [engine.module, *engine.options, *engine.programs, *_GO_BUILD]
    if engine.manifest:
        recipe.append((collector_directory() / engine.manifest).read_text())
    key = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:12]
    return cache_directory() / f"{engine.name}-{engine.version}-{key}"


@contextmanager
def _locked(path: Path, report_waiting: Callable[[], object]) -> Iterator[int]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report_waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _failure(command: tuple[str, ...], code: int, printed: str) -> EngineError | OSError:
    """Return the error for a failed step of a build: a full disk, no network, or the end of its output."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if any(sign in line.lower() for line in lines for sign in _FULL):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    step = f"`{Path(command[0]).name} {' '.join(command[1:3])} ...`"
    unreached = next(
        (line for line in reversed(lines) if any(sign in line.lower() for sign in _UNREACHED)), None
    )
    if unreached:
        return EngineError(
            f"{step} cannot fetch modules; check the network, or set GOPROXY to a mirror that "
            f"answers: {unreached}"
        )
    return EngineError(f"{step} failed with exit code {code}:\n  " + "\n  ".join(lines[-8:]))


def _disk_message(directory: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left for the engines in {directory} or Go's caches; a first build takes about "
            f"{DISK_BYTES >> 30} GiB: "
            "free some space, or set XDG_CACHE_HOME, GOCACHE and GOMODCACHE to another disk"
        )
    return (
        f"{directory} cannot hold the engines ({error.strerror}); set XDG_CACHE_HOME to a "
        "directory that you can write"
    )
