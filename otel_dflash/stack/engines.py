"""Which engines, of which version, and how each is built from its modules into a cache.

::

    ~/.cache/otel-dflash/engines/            $XDG_CACHE_HOME when set
        jaeger-2.13.0-<recipe>/jaeger        complete when it exists: built beside it, then renamed
        jaeger-2.13.0-<recipe>.lock          held while somebody builds it
        .build-XXXX/                         what a killed build left; the next build of that engine removes it

<recipe> is a hash of all that a build reads (modules, versions, tags, the collector's manifest), so another version is another
directory, and an unchanged one is never built again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[1]
DISK_BYTES: Final = 12 << 30  # Go's module and build caches while all engines are built from nothing

_GO_BUILD: Final = ("go", "build", "-trimpath", "-ldflags", "-s -w")
_OCB: Final = "go.opentelemetry.io/collector/cmd/builder"
_JAEGER: Final = "github.com/jaegertracing/jaeger/cmd/jaeger"
_PROMETHEUS: Final = "github.com/prometheus/prometheus"
_KAFKA_POM: Final = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>otel-dflash</groupId><artifactId>kafka</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{version}</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""


class EngineError(Exception):
    """An engine cannot be built, found or started; the text says what, the value, and the remedy."""


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
    steps: Callable[[Path, Engine], None]
    """Builds the programs into the directory `out` below the given one."""
    minutes: int
    """About how long a build takes on two cores with empty caches."""
    needs: tuple[tuple[str, str], ...] = (("go", "Go >= 1.25 (https://go.dev/dl)"),)
    """Commands that a build runs, each with what to install."""


def _build_otelcol(work: Path, engine: Engine) -> None:
    shutil.copy(collector_directory() / "builder.yaml", work)
    _run(work, "go", "install", engine.module, GOBIN=str(work))
    _run(work, str(work / "builder"), "--config", "builder.yaml", "--skip-compilation")
    _run(work / "build", *_GO_BUILD, "-o", str(work / "out" / "otelcol"), ".")


def _build_jaeger(work: Path, engine: Engine) -> None:
    _run(work, "go", "mod", "init", "otel_dflash/jaeger")
    _run(work, "go", "get", "-tool", engine.module)
    _run(work, *_GO_BUILD, "-o", str(work / "out" / "jaeger"), _JAEGER)


def _build_prometheus(work: Path, engine: Engine) -> None:
    _run(work, "go", "mod", "init", "otel_dflash/prometheus")
    _run(work, "go", "get", "-tool", *(f"{_PROMETHEUS}/cmd/{program}@{engine.module.split('@')[1]}" for program in engine.programs))
    for program in engine.programs:  # static targets and OTLP are all we use: without service discovery the build takes half the time
        _run(work, *_GO_BUILD, "-tags", "remove_all_sd", "-o", str(work / "out" / program), f"{_PROMETHEUS}/cmd/{program}")


def _build_kafka(work: Path, engine: Engine) -> None:
    (work / "pom.xml").write_text(_KAFKA_POM.format(version=engine.version))
    _run(work, "mvn", "--batch-mode", "--quiet", "dependency:copy-dependencies", f"-DoutputDirectory={work / 'out' / 'libs'}")


ENGINES: Final = {
    engine.name: engine
    for engine in (
        Engine("otelcol", "0.161.0", "otel/opentelemetry-collector-contrib:0.161.0", ("otelcol",), f"{_OCB}@v0.161.0", _build_otelcol, 6),
        Engine(
            "prometheus",
            "3.16.0",
            "prom/prometheus:v3.16.0",
            ("prometheus", "promtool"),
            f"{_PROMETHEUS}@v0.316.0",
            _build_prometheus,
            7,
        ),
        Engine("jaeger", "2.13.0", "jaegertracing/jaeger:2.13.0", ("jaeger",), f"{_JAEGER}@v1.76.0", _build_jaeger, 9),
        Engine(
            "kafka",
            "4.1.0",
            "apache/kafka:4.1.0",
            ("libs",),
            "org.apache.kafka:kafka_2.13:4.1.0",
            _build_kafka,
            1,
            (("mvn", "Maven >= 3.8"), ("java", "a Java runtime >= 17")),
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
    """Return where built engines lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "otel-dflash" / "engines"


def find(engine: Engine, program: str | None = None) -> Path | None:
    """Return the path of a built program, by default the engine's own; None when it was not built."""
    path = _directory(engine) / (program or engine.programs[0])
    return path if path.exists() else None


def build(engine: Engine) -> Path:
    """Return the path of the engine, built now unless it was. Of two builds at once one waits for the other.

    Raises:
        EngineError: A command is missing, or a step failed; nothing is left in the cache then.
    """
    directory = _directory(engine)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_name(f"{directory.name}.lock")):
            if not directory.is_dir():
                _build_into(engine, directory)
    except OSError as error:
        raise EngineError(_disk_message(directory.parent, error)) from None
    return directory / engine.programs[0]


def _build_into(engine: Engine, directory: Path) -> None:
    for command, remedy in engine.needs:
        if shutil.which(command) is None:
            raise EngineError(f"{engine.name} is built with {command!r}, which is not on PATH; install {remedy}")
    prefix = f".build-{directory.name}-"
    for left in directory.parent.glob(f"{prefix}*"):  # the lock is ours, so whoever made it is gone
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    try:
        (work / "out").mkdir()
        engine.steps(work, engine)
        for program in engine.programs:
            if not (work / "out" / program).exists():
                raise EngineError(f"the build of {engine.name} made no {program!r}; please report it")
        (work / "out").rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _directory(engine: Engine) -> Path:
    recipe = [engine.module, *engine.programs, *_GO_BUILD]
    if engine.name == "otelcol":
        recipe.append((collector_directory() / "builder.yaml").read_text())
    key = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:12]
    return cache_directory() / f"{engine.name}-{engine.version}-{key}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when a build is killed
        yield


def _run(directory: Path, *command: str, **environment: str) -> None:
    """Run one step of a build; what it prints is kept for the message of a failure."""
    settings = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": f"{os.environ.get('GOFLAGS', '')} -mod=mod".strip(), **environment}
    result = subprocess.run(
        command,
        cwd=directory,
        env=settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        if os.strerror(errno.ENOSPC) in result.stdout or "no space left" in result.stdout:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        last = "\n  ".join(result.stdout.strip().splitlines()[-8:])
        raise EngineError(f"`{' '.join(command[:3])} ...` failed with exit code {result.returncode} in {directory.name}:\n  {last}")


def _disk_message(directory: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left for the engines in {directory} or Go's caches; a first build takes about {DISK_BYTES >> 30} GiB: "
            "free some, or point XDG_CACHE_HOME, GOCACHE and GOMODCACHE elsewhere"
        )
    return f"{directory} cannot hold the engines ({error.strerror}); point XDG_CACHE_HOME at a directory of yours"
