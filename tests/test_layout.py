"""Folders are processes, layers and dependency boundaries: what each may import. This file is the
documentation of that."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import otel_dflash

PACKAGE = Path(otel_dflash.__file__).parent
SDK = "opentelemetry.sdk"


class Room(NamedTuple):
    """What the files below a path may import: from outside, and of our own besides each other and the files
    of ROOT."""

    outside: frozenset[str] = frozenset()
    """Packages besides the standard library; `opentelemetry` is the API alone."""
    ours: tuple[str, ...] = ()
    """Paths below otel_dflash/."""


ROOT = ""
# The longest prefix of a file's path counts. Layers stand in order: each imports only what stands above it.
ROOMS = {
    ROOT: Room(),  # bytes, names, settings: every process has them
    "__init__.py": Room(ours=("trainer",)),  # the public names
    "__main__.py": Room(ours=("cli",)),
    "trainer": Room(),  # lives in the training process
    "recording": Room(frozenset({"numpy"})),
    "spans": Room(frozenset({"numpy"}), ("recording",)),
    "metrics": Room(frozenset({"numpy"}), ("recording", "spans")),
    "otlp": Room(frozenset({"opentelemetry", SDK}), ("recording", "spans", "metrics")),
    "supervisor": Room(),  # the agent's parent
    "agent": Room(frozenset({"numpy", "opentelemetry"}), ("recording", "spans", "metrics", "otlp")),
    "agent/sinks": Room(frozenset({"opentelemetry", SDK}), ("recording", "spans", "metrics", "otlp")),
    "agent/children": Room(),  # processes of their own ...
    "agent/children/nvml.py": Room(frozenset({"pynvml"})),  # ... each with the package that may hang
    "views": Room(frozenset({"numpy", "rich"}), ("recording", "metrics")),  # never the SDK
    "stack": Room(),  # the engines: builds and runs other programs
    "doctor": Room(
        frozenset({"certifi", "opentelemetry"}),
        ("trainer/writer", "recording", "spans", "otlp", "agent/children", "stack"),
    ),
    # the span and the metric it sends
    "doctor/canary.py": Room(frozenset({"opentelemetry", SDK}), ("otlp",)),
    "cli": Room(
        frozenset({"click", "rich"}),
        ("recording", "spans", "otlp", "supervisor", "agent", "views", "stack", "doctor"),
    ),
}
FOREIGN_TO_A_TRAINER = {
    "opentelemetry",
    "grpc",
    "google.protobuf",
    "pynvml",
    "wandb",
    "numpy",
    "torch",
    "click",
    "rich",
    "psutil",
}

PUBLIC_NAMES = ["ConfigError", "Context", "Phase", "Step", "Telemetry", "Worker", "__version__", "start"]


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Yield every module that a file names in an import, also inside functions. `from a import b` counts as
    a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


def path_of(module: str) -> str:
    """Return where a module of ours, or a name in one, lies below otel_dflash/."""
    path = Path(*module.split(".")[1:])
    for candidate in (path, path.parent):
        if (PACKAGE / candidate).is_dir() and candidate != Path():
            return str(candidate)
        if (PACKAGE / candidate).with_suffix(".py").is_file() and candidate != Path():
            return str(candidate.with_suffix(".py"))
    return "__init__.py"


def is_below(path: str, prefix: str) -> bool:
    """Return whether a path is a prefix or lies below it; below ROOT lie only the files that have no folder
    of their own."""
    return (
        "/" not in path and path.endswith(".py")
        if prefix == ROOT
        else path == prefix or path.startswith(f"{prefix}/")
    )


def room_of(path: str) -> str:
    """Return the longest prefix of ROOMS that a file lies below."""
    return max((prefix for prefix in ROOMS if is_below(path, prefix)), key=len)


def is_allowed(module: str, path: str) -> bool:
    prefix = room_of(path)
    room = ROOMS[prefix]
    top = module.split(".")[0]
    if top == "otel_dflash":
        target = path_of(module)
        own = max(
            (room for room in ROOMS if not room.endswith(".py") and is_below(path, room)),
            key=len,
            default=ROOT,
        )
        return any(is_below(target, allowed) for allowed in (ROOT, own, *room.ours))
    if module.startswith("opentelemetry.exporter") or re.search(r"^opentelemetry\..*\b_[a-z]", module):
        return (
            False  # exporters come by entry point; private names (_logs, _incubating) change without notice
        )
    if module.startswith(SDK):
        return SDK in room.outside
    return top in sys.stdlib_module_names or top in room.outside


def source_files() -> dict[str, ast.Module]:
    """Return the tree of each file by its path below otel_dflash/."""
    paths = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    return {
        str(path): ast.parse((PACKAGE / path).read_text()) for path in paths if "examples" not in path.parts
    }


def test_each_folder_imports_only_what_stands_above_it() -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in source_files().items()
        for name in imported_modules(tree)
        if not is_allowed(name, path)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("trainer/worker.py", "import numpy"),
        ("trainer/worker.py", "def f():\n    from otel_dflash.agent import drain"),
        ("trainer/worker.py", "from . import writer"),
        ("trainer/instrument/megatron.py", "from otel_dflash.recording import frames"),
        ("ring.py", "from otel_dflash import trainer"),
        ("recording/reader.py", "from otel_dflash.metrics.fold import Fold"),
        ("spans/replay.py", "from opentelemetry.trace import SpanKind"),
        ("metrics/families/queues.py", "from otel_dflash.otlp import resources"),
        ("metrics/families/queues.py", "import opentelemetry"),
        ("supervisor/supervisor.py", "import numpy"),
        ("supervisor/supervisor.py", "from otel_dflash.recording import reader"),
        ("agent/drain.py", "from opentelemetry.sdk.trace import ReadableSpan"),
        ("agent/drain.py", "from opentelemetry import sdk"),
        ("agent/drain.py", "import otel_dflash.trainer.worker"),
        ("agent/children/child.py", "from otel_dflash.views.summary import summarise"),
        ("agent/children/nvml.py", "from otel_dflash.agent import loop"),
        ("agent/children/wandb.py", "import pynvml"),
        ("doctor/gpu.py", "from otel_dflash.agent.loop import main"),
        ("otlp/exporters.py", "import opentelemetry.exporter.otlp.proto.grpc"),
        ("otlp/exporters.py", "from opentelemetry.sdk import _logs"),
        ("views/summary.py", "from otel_dflash.trainer.worker import Worker"),
        ("views/summary.py", "import opentelemetry"),
        ("views/summary.py", "from otel_dflash.otlp.resources import Resources"),
    ],
)
def test_the_rule_sees_what_it_forbids(file: str, source: str) -> None:
    assert [name for name in imported_modules(ast.parse(source)) if not is_allowed(name, file)]


def test_a_layer_names_only_rooms_above_it() -> None:
    order = {prefix: place for place, prefix in enumerate(ROOMS) if "." not in prefix}
    above = {
        prefix: [ours for ours in room.ours if order.get(ours.split("/")[0], -1) >= order[prefix]]
        for prefix, room in ROOMS.items()
        if prefix in order
    }
    assert {prefix: wrong for prefix, wrong in above.items() if wrong} == {}


def test_no_module_imports_itself_through_others() -> None:
    graph = {}
    for path, tree in source_files().items():
        typing_only = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        for node in typing_only:
            node.body = []
        graph[path] = {
            path_of(name) for name in imported_modules(tree) if name.startswith("otel_dflash.")
        } - {path}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names them


def test_public_names_are_frozen() -> None:
    assert sorted(otel_dflash.__all__) == PUBLIC_NAMES
    assert [name for name in PUBLIC_NAMES if not hasattr(otel_dflash, name)] == []


def test_a_file_fits_in_the_head() -> None:
    lines = {path: len((PACKAGE / path).read_text().splitlines()) for path in source_files()}
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
def test_a_trainer_loads_nothing_foreign(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_DFLASH_DIR", str(tmp_path))
    monkeypatch.delenv("OTEL_DFLASH_SESSION", raising=False)
    result = subprocess.run(
        [sys.executable, "-c", program + REPORT],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stderr == ""
    assert json.loads(result.stdout) == []
