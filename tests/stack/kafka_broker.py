"""A real Apache Kafka for tests: one broker in KRaft mode, run from its jars with Java, on loopback and free
ports."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.stack.conftest import end_with_this_process, free_ports, need_engine

START_S = 60.0
CLUSTER_ID = "AAAAAAAAAAAAAAAAAAAAAA"  # 16 bytes in base64, as StorageTool wants them
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={logs}
num.partitions=4
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


class KafkaBroker:
    """Context manager. It can be killed and started again at the same place."""

    def __init__(self, directory: Path) -> None:
        self._libraries = need_engine("kafka")
        if shutil.which("java") is None:
            pytest.fail("Kafka needs java") if os.environ.get("CI") == "true" else pytest.skip(
                "Kafka needs java: install a runtime >= 17"
            )
        self.port, controller = free_ports(2)
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True)
        self._properties = directory / "server.properties"
        self._properties.write_text(
            PROPERTIES.format(port=self.port, controller=controller, logs=directory / "logs")
        )
        self._run(
            "kafka.tools.StorageTool", "format", "--cluster-id", CLUSTER_ID, "--config", str(self._properties)
        ).wait(START_S)

    @property
    def brokers(self) -> str:
        """Return it as KAFKA_BROKERS."""
        return f"[127.0.0.1:{self.port}]"

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        self._process = self._run("kafka.Kafka", str(self._properties))
        self._guard = end_with_this_process(self._process.pid)
        deadline = time.monotonic() + START_S
        while not self._listens():
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, "Kafka does not listen"
            select.select([], [], [], 0.1)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal."""
        assert self._process
        self._process.send_signal(number)
        self._process.wait(START_S)
        self._process = None
        self._guard.communicate(timeout=START_S)

    @property
    def log(self) -> str:
        return (self._directory / "kafka.log").read_text(errors="replace")

    def __enter__(self) -> KafkaBroker:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process:
            self.end(signal.SIGKILL)

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        options = (
            "-Xms64m",
            "-Xmx384m",
            "-XX:TieredStopAtLevel=1",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        )
        with (self._directory / "kafka.log").open("ab") as log:
            return subprocess.Popen(
                ["java", *options, "-cp", f"{self._libraries}/*", program, *arguments],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
