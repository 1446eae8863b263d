"""Kafka, built from its Maven artifacts into the cache of the engines: only tests run it.

Run: python -m tests.stack.kafka_build     (`make engines` does)
"""

from __future__ import annotations

import shutil
import sys
from typing import Final

from otel_dflash.stack.control import interruptible
from otel_dflash.stack.engines import Engine, EngineError, Workshop, build, find

_DEPENDENCY: Final = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
)
_POM: Final = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>otel-dflash</groupId><artifactId>engine</artifactId><version>1</version>
  <dependencies>{}</dependencies>
</project>
"""


def _fetch_jars(shop: Workshop, engine: Engine) -> None:
    artifacts = (engine.module, *engine.options)
    dependencies = "".join(_DEPENDENCY.format(*coordinates.split(":")) for coordinates in artifacts)
    (shop.directory / "pom.xml").write_text(_POM.format(dependencies))
    directory = f"-DoutputDirectory={shop.out / 'libs'}"
    shop.run("mvn", "--batch-mode", "--quiet", "dependency:copy-dependencies", directory)


KAFKA: Final = Engine(
    name="kafka",
    version="4.1.0",
    image="apache/kafka:4.1.0",
    programs=("libs",),
    module="org.apache.kafka:kafka_2.13:4.1.0",
    steps=_fetch_jars,
    minutes=1,
    options=("org.slf4j:slf4j-simple:1.7.36",),
)


def main() -> int:
    """Build Kafka unless it is built; return the exit code. Without Maven it is left out, which is no failure."""
    if find(KAFKA) is None and shutil.which("mvn") is None:
        print(
            "kafka left out, and the tests of the variant with a broker: install Maven >= 3.8 (mvn is not on PATH)"
        )
        return 0
    try:
        with interruptible():
            print(f"{KAFKA.name} {KAFKA.version}: {build(KAFKA, print)}")
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
