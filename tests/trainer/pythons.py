"""The same check of tests/trainer/atomicity.py under each Python of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import atomicity

ROOT = Path(__file__).parents[2]


def other_pythons() -> list[str]:
    """Return interpreters of other versions that this machine has: on the PATH, and of pyenv."""
    candidates = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    with suppress(PermissionError):  # another user's
        candidates += map(str, sorted(pyenv.glob("versions/3.1?.*/bin/python")))
    found: dict[tuple[int, ...], str] = {sys.version_info[:2]: ""}
    for candidate in filter(None, candidates):
        asked = subprocess.run(
            [candidate, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, check=False
        )
        if asked.returncode == 0:
            found.setdefault(tuple(map(int, asked.stdout.split())), candidate)
    return [candidate for candidate in found.values() if candidate]


def check(python: str, name: str) -> Any:
    """Run a check of tests/trainer/atomicity.py, "" in this process."""
    if not python:
        return atomicity.CHECKS[name]()
    command = [python, "-m", "tests.trainer.atomicity", name]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(result.stdout)[name]


on_each_python = pytest.mark.parametrize(
    "python", ["", *other_pythons()], ids=lambda path: Path(path or sys.executable).parent.parent.name
)
