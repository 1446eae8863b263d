"""Folders are processes and dependency boundaries: what each may import. This file is the documentation of that."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import otel_dflash

PACKAGE = Path(otel_dflash.__file__).parent

# folder: (what it may import from outside besides the standard library, what of our own)
MAY_IMPORT = {
    ".": (set(), {"."}),  # records, ring, session, semconv, config: every process uses them
    "trainer": (set(), {".", "trainer"}),  # lives in the training process
    "agent": ({"numpy", "opentelemetry"}, {".", "agent"}),  # opentelemetry: the API
    "views": ({"numpy", "rich"}, {".", "agent", "views"}),
    "stack": (set(), {".", "stack"}),  # the engines: builds and runs other programs
    "doctor": ({"certifi", "opentelemetry"}, {".", "trainer", "agent", "stack", "doctor"}),
    "cli": ({"click", "rich"}, {".", "trainer", "agent", "views", "stack", "doctor", "cli"}),
}
# files that may do more than their folder
MAY_ALSO_IMPORT = {
    "__init__.py": {"trainer"},  # the public names
    "__main__.py": {"cli"},
    "agent/replay.py": {"opentelemetry.sdk"},  # spans
    "agent/metrics.py": {"opentelemetry.sdk"},  # metric points
    "agent/resources.py": {"opentelemetry.sdk"},
    "agent/exporters.py": {"opentelemetry.sdk"},
    "doctor/canary.py": {"opentelemetry.sdk"},  # the span and the metric it sends
    "agent/sinks.py": {"opentelemetry.sdk"},  # what an export returned
    "agent/span_sink.py": {"opentelemetry.sdk"},
    "agent/sampling.py": {"opentelemetry.sdk"},  # how a ratio becomes a bound
}
FOREIGN_TO_A_TRAINER = {"opentelemetry", "grpc", "google.protobuf", "pynvml", "wandb", "numpy", "torch", "click", "rich", "psutil"}

PUBLIC_NAMES = ["ConfigError", "Phase", "Step", "Telemetry", "Worker", "__version__", "start"]


def imported_modules(path: Path) -> set[str]:
    """Return every module that a file names in an import, also inside functions. `from a import b` counts as a.b."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names}
    return modules


def folder_of(module: str) -> str:
    """Return the folder of ours that a module lies in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "."


def is_allowed(module: str, path: Path) -> bool:
    relative = path.relative_to(PACKAGE)
    outside, ours = MAY_IMPORT[str(relative.parent)]
    also = MAY_ALSO_IMPORT.get(str(relative), set())
    top = module.split(".")[0]
    if top == "otel_dflash":
        return folder_of(module) in ours | also
    if module.startswith("opentelemetry.exporter") or re.search(r"^opentelemetry\..*\b_[a-z]", module):
        return False  # exporters come by entry point; private names (_logs, _incubating) change without notice
    if module.startswith("opentelemetry.sdk"):
        return "opentelemetry.sdk" in also
    return top in sys.stdlib_module_names or top in outside


def source_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "examples" not in path.relative_to(PACKAGE).parts]


def test_each_folder_imports_only_what_its_process_has() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in source_files()
        for name in imported_modules(path)
        if not is_allowed(name, path)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("trainer/worker.py", "import numpy"),
        ("trainer/worker.py", "def f():\n    from otel_dflash.agent import drain"),
        ("trainer/worker.py", "from . import writer"),
        ("ring.py", "from otel_dflash import trainer"),
        ("agent/drain.py", "from opentelemetry.sdk.trace import ReadableSpan"),
        ("agent/drain.py", "from opentelemetry import sdk"),
        ("agent/drain.py", "import otel_dflash.trainer.worker"),
        ("agent/exporters.py", "import opentelemetry.exporter.otlp.proto.grpc"),
        ("agent/replay.py", "from opentelemetry.sdk import _logs"),
        ("views/summary.py", "from otel_dflash.trainer.worker import Worker"),
        ("views/summary.py", "import opentelemetry"),
    ],
)
def test_the_rule_sees_what_it_forbids(file: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(source)
    assert [name for name in imported_modules(path) if not is_allowed(name, PACKAGE / file)]


def test_views_need_no_sdk() -> None:
    needs_sdk = {
        f"otel_dflash.{name.removesuffix('.py').replace('/', '.')}" for name, also in MAY_ALSO_IMPORT.items() if "opentelemetry.sdk" in also
    }
    views = [path for path in source_files() if path.parent.name == "views"]
    wrong = {(path.name, name) for path in views for name in imported_modules(path) if name.startswith(tuple(needs_sdk))}
    assert wrong == set()


def test_public_names_are_frozen() -> None:
    assert sorted(otel_dflash.__all__) == PUBLIC_NAMES
    assert [name for name in PUBLIC_NAMES if not hasattr(otel_dflash, name)] == []


def test_a_file_fits_in_the_head() -> None:
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in source_files()}
    assert {name: count for name, count in lines.items() if count > 400} == {}


IMPORT = "import otel_dflash"
USE = """
import otel_dflash
telemetry = otel_dflash.start()
assert telemetry.enabled
worker = telemetry.worker("target", 0)
with worker.step() as step:
    with worker.forward:
        step.set(tokens=1)
telemetry.close()
"""
REPORT = f"""
import json, sys
print(json.dumps([name for name in {sorted(FOREIGN_TO_A_TRAINER)} if name in sys.modules]))
"""


@pytest.mark.parametrize("program", [IMPORT, USE])
def test_a_trainer_loads_nothing_foreign(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_DFLASH_DIR", str(tmp_path))
    monkeypatch.delenv("OTEL_DFLASH_SESSION", raising=False)
    result = subprocess.run(
        [sys.executable, "-c", program + REPORT], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stderr == ""
    assert json.loads(result.stdout) == []
