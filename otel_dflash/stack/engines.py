"""Which engines, of which version, and how each is built from its modules into a cache.

::

    ~/.cache/otel-dflash/engines/            $XDG_CACHE_HOME when set
        jaeger-2.13.0-<recipe>/jaeger        complete when it exists: built beside it, then renamed
        jaeger-2.13.0-<recipe>.lock          held while somebody builds it, by the builders too
        .build-jaeger-2.13.0-<recipe>-XXXX/  what a killed build left; the next build of that engine removes it

<recipe> is a hash of all that a build reads (modules, versions, flags, the collector's manifest), so another version is another
directory, and an unchanged one is never built again.
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
DISK_BYTES: Final = 12 << 30  # Go's module and build caches while all engines are built from nothing

_GO_BUILD: Final = ("go", "build", "-trimpath", "-ldflags", "-s -w")
_OCB: Final = "go.opentelemetry.io/collector/cmd/builder"
_JAEGER: Final = "github.com/jaegertracing/jaeger/cmd/jaeger"
_PROMETHEUS: Final = "github.com/prometheus/prometheus"
_DEPENDENCY: Final = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
_POM: Final = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>otel-dflash</groupId><artifactId>engine</artifactId><version>1</version>
  <dependencies>{}</dependencies>
</project>
"""

_FULL: Final = ("no space left on device", "disk quota exceeded")
_UNREACHED: Final = (
    "dial tcp",
    "no such host",
    "i/o timeout",
    "connection refused",
    "network is unreachable",
    "could not transfer artifact",
)
_FIRST_TO_FETCH: Final = [1, 21]
_ELSEWHERE: Final = ("GOOS", "GOARCH", "GOWORK")  # a user's cross compilation or workspace is not ours


class EngineError(Exception):
    """An engine cannot be built, found or started; the text says what, the value, and the remedy."""


@dataclass(frozen=True)
class Workshop:
    """A directory beside the finished engines in which one is built; what `out` in it holds becomes the engine."""

    directory: Path
    lock: int
    """Descriptor of the lock: builders hold it too, so those of a killed build keep others out until they have ended."""

    @property
    def out(self) -> Path:
        """Return where finished programs go."""
        return self.directory / "out"

    def run(self, *command: str, below: str = "", **variables: str) -> None:
        """Run one step of a build. What it prints is kept for the message of a failure; an interrupt ends it and its children.

        Raises:
            EngineError: It failed; the text has the end of what it printed.
            OSError: It could not be started, or the disk is full.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
        go = {"CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": f"{os.environ.get('GOFLAGS', '')} -mod=mod".strip()}
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
    """As its release and its container image name it."""
    image: str
    """The container image with the same version, as compose.yaml pins it."""
    programs: tuple[str, ...]
    """What a finished build holds; the first one is the engine."""
    module: str
    """What it is built from, with the module's own version."""
    steps: Callable[[Workshop, Engine], None]
    """Builds the programs into the workshop's `out`."""
    minutes: int
    """About how long a build takes on two cores with empty caches."""
    options: tuple[str, ...] = ()
    """What else a build reads: flags, further modules."""
    manifest: str = ""
    """The file of collector/ that says what is in it."""
    go: str = ""
    """The oldest Go that its modules name; "" when Go does not build it."""
    needs: tuple[tuple[str, str], ...] = ()
    """Other commands that a build runs, each with what to install."""


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
    shop.run("go", "get", "-tool", *(f"{_PROMETHEUS}/cmd/{program}@{engine.module.split('@')[1]}" for program in engine.programs))
    for program in engine.programs:
        shop.run(*_GO_BUILD, *engine.options, "-o", str(shop.out / program), f"{_PROMETHEUS}/cmd/{program}")


def _build_kafka(shop: Workshop, engine: Engine) -> None:
    dependencies = (_DEPENDENCY.format(*coordinates.split(":")) for coordinates in (engine.module, *engine.options))
    (shop.directory / "pom.xml").write_text(_POM.format("".join(dependencies)))
    shop.run("mvn", "--batch-mode", "--quiet", "dependency:copy-dependencies", f"-DoutputDirectory={shop.out / 'libs'}")


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
            options=("-tags", "remove_all_sd"),  # static targets and OTLP are all we use: half the time without service discovery
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
        Engine(
            name="kafka",
            version="4.1.0",
            image="apache/kafka:4.1.0",
            programs=("libs",),
            module="org.apache.kafka:kafka_2.13:4.1.0",
            steps=_build_kafka,
            minutes=1,
            options=("org.slf4j:slf4j-simple:1.7.36",),
            needs=(("mvn", "Maven >= 3.8"), ("java", "a Java runtime >= 17")),
        ),
    )
}


def collector_directory() -> Path:
    """Return the directory of the configurations: beside the package in a checkout, inside it in an installed wheel.

    Raises:
        EngineError: Neither is there.
    """
    for base in (PACKAGE.parent, PACKAGE):
        if (base / "collector" / "builder.yaml").is_file():
            return base / "collector"
    raise EngineError(f"the configurations of the engines are not installed ({PACKAGE / 'collector'}); reinstall otel-dflash")


def cache_directory() -> Path:
    """Return where built engines lie.

    Raises:
        EngineError: There is no home.
    """
    return own_directory("XDG_CACHE_HOME", ".cache") / "engines"


def own_directory(variable: str, below_home: str) -> Path:
    """Return our directory where an XDG variable says, else below the home. As XDG has it, a path that is not absolute does not count.

    Raises:
        EngineError: There is no home.
    """
    given = Path(os.environ.get(variable, ""))
    try:
        return (given if given.is_absolute() else Path.home() / below_home) / "otel-dflash"
    except RuntimeError:
        raise EngineError(f"this user has no home directory; point {variable} at a directory of theirs") from None


def find(engine: Engine, program: str | None = None) -> Path | None:
    """Return the path of a built program, by default the engine's own; None when it was not built."""
    path = program_path(engine, program)
    return path if path.exists() else None


def program_path(engine: Engine, program: str | None = None) -> Path:
    """Return where a program of the engine lies once it is built."""
    return _directory(engine) / (program or engine.programs[0])


def missing_command(engine: Engine) -> str | None:
    """Return what is missing to build the engine, with the remedy; None when all its commands are here."""
    go = (("go", f"Go >= {engine.go} (https://go.dev/dl)"),) if engine.go else ()
    for command, remedy in (*go, *engine.needs):
        if shutil.which(command) is None:
            return f"{engine.name} is built with {command!r}, which is not on PATH; install {remedy}"
    return _old_go(engine) if go else None


def _old_go(engine: Engine) -> str | None:
    """Return why the Go that is here cannot build the engine, None when it can, or may fetch a newer one that can."""
    command = ("go", "env", "GOVERSION", "GOTOOLCHAIN")
    asked = subprocess.run(command, cwd="/", env={**os.environ, "GOWORK": "off"}, capture_output=True, text=True, check=False)
    version, toolchain = (*asked.stdout.splitlines(), "", "")[:2]
    here = _numbers(version)
    fetches = here >= _FIRST_TO_FETCH and toolchain.endswith(("auto", "path"))  # auto, path, go1.26.0+auto, ...
    if not here or here >= _numbers(engine.go) or fetches:
        return None
    return (
        f"{engine.name} is built with Go >= {engine.go}, and the one on PATH is {version} (GOTOOLCHAIN={toolchain or 'unknown to it'}); "
        "install a newer one (https://go.dev/dl), or let Go >= 1.21 fetch it: GOTOOLCHAIN=auto"
    )


def _numbers(version: str) -> list[int]:
    """Return the numbers of a Go version such as go1.26.8, [] of another text."""
    found = re.search(r"\d+(\.\d+)+", version)
    return [int(number) for number in found[0].split(".")] if found else []


def build(engine: Engine, say: Callable[[str], object] = lambda line: None) -> Path:
    """Return the path of the engine, built now unless it was. Of two builds at once one waits for the other; `say` gets what takes long.

    Raises:
        EngineError: A command is missing, or a step failed; nothing is left in the cache then.
    """
    directory = _directory(engine)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_name(f"{directory.name}.lock"), lambda: say(f"{engine.name} is being built already; waiting")) as lock:
            if not all((directory / program).exists() for program in engine.programs):  # not built, or a part was removed since
                if missing := missing_command(engine):
                    raise EngineError(missing)
                minutes = f"{engine.minutes} minute{'s' if engine.minutes > 1 else ''}"
                say(f"building {engine.name} {engine.version}, once: about {minutes} on two cores")
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
def _locked(path: Path, say_waiting: Callable[[], object]) -> Iterator[int]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say_waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _failure(command: tuple[str, ...], code: int, printed: str) -> EngineError | OSError:
    """Return what is wrong when a step of a build failed: the disk, the network, or what it says itself."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if any(sign in line.lower() for line in lines for sign in _FULL):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    step = f"`{Path(command[0]).name} {' '.join(command[1:3])} ...`"
    unreached = next((line for line in reversed(lines) if any(sign in line.lower() for sign in _UNREACHED)), None)
    if unreached:
        remedy = "~/.m2/settings.xml" if command[0] == "mvn" else "GOPROXY"
        return EngineError(f"{step} cannot fetch modules; check the network, or name a mirror that answers here in {remedy}: {unreached}")
    return EngineError(f"{step} failed with exit code {code}:\n  " + "\n  ".join(lines[-8:]))


def _disk_message(directory: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left for the engines in {directory} or Go's caches; a first build takes about {DISK_BYTES >> 30} GiB: "
            "free some, or point XDG_CACHE_HOME, GOCACHE and GOMODCACHE elsewhere"
        )
    return f"{directory} cannot hold the engines ({error.strerror}); point XDG_CACHE_HOME at a directory of yours"
