from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor.training import Training


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="otel-dflash-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def train(tmp_path: Path, shm: Path) -> Iterator[Any]:
    trainings = []

    def start(how: str = "start", **variables: str) -> Training:
        trainings.append(Training(tmp_path, shm, how, **variables))
        return trainings[-1]

    yield start
    for training in trainings:
        training.close()
