"""An engine that builds in a second: a Go program whose source is its manifest.

tests/stack/test_engines.py runs this file, also twice at once.

Usage: tiny_engine.py DIRECTORY. In it: manifest.go, the source; `hold` makes the build stand still until
`go-on` is there; `builds` gets a
line for each build and `tools` the pid of each of the builders.
"""

from __future__ import annotations

import sys
from pathlib import Path

from otel_dflash.stack.control import interruptible
from otel_dflash.stack.engines import Engine, EngineError, Workshop, build

SOURCE = 'package main\n\nfunc main() {{ println("{}") }}\n'
GATE = """#!/bin/sh
cd "$(dirname "$0")"
echo $PPID >> tools; echo $$ >> tools
while test -e hold && ! test -e go-on; do sleep 0.02; done
cd "$OLDPWD"
exec "$@"
"""


def tiny(directory: Path) -> Engine:
    """Return the engine whose files lie in `directory`."""

    def steps(shop: Workshop, engine: Engine) -> None:
        with (directory / "builds").open("a") as file:
            file.write("built\n")
        (shop.directory / "main.go").write_text((directory / engine.manifest).read_text())
        gate = directory / "gate"
        gate.write_text(GATE)
        gate.chmod(0o755)
        shop.run("go", "mod", "init", "tiny")
        # with it Go takes nothing from its cache
        held = ("-toolexec", str(gate)) if (directory / "hold").exists() else ()
        shop.run("go", "build", "-ldflags", "-s -w", *held, "-o", str(shop.out / "tiny"), ".")

    manifest = str(directory / "manifest.go")
    return Engine("tiny", "1.0", "tiny:1.0", ("tiny",), "tiny@v1.0", steps, minutes=1, manifest=manifest)


def main() -> int:
    """Build it, and print what it says and where it lies."""
    try:
        with interruptible():
            print(build(tiny(Path(sys.argv[1])), lambda line: print(line, flush=True)))
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
