"""collector/README.md is true: its variables are those that are read, and the collector and Compose take its files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_dflash.stack.engines import collector_directory
from otel_dflash.stack.native import NAMES
from otel_dflash.stack.services import SERVICES
from tests.compose import Loader
from tests.stack.conftest import READ, need_engine
from tests.stack.nodes import TIERS

DIRECTORY = collector_directory()
README = (DIRECTORY / "README.md").read_text()
SNIPPETS = dict(re.findall(r"```yaml\n# (\S+)\n(.*?)```", README, re.DOTALL))
WIRING = {
    *("receivers", "processors", "exporters", "extensions", "endpoint", "hostnames", "trace_storage", "topic", "topics", "encoding"),
    *("name", "service.name", "key", "action", "type", "value", "keys", "values"),
}
"""Settings that say what is connected to what, and where: the files themselves."""
CONTAINERS_ONLY = {"GRAFANA_PORT", "GRAFANA_ADMIN_PASSWORD"}


def test_the_table_of_variables_is_what_the_configurations_read() -> None:
    table = dict(re.findall(r"^\| `([A-Z_]+)` \| (\S+) \|", README, re.MULTILINE))
    read = {name: default for file in ("otelcol", "jaeger") for name, default in READ.findall((DIRECTORY / f"{file}.yaml").read_text())}
    prometheus = SERVICES["prometheus"].variables
    assert {name: default for name, default in table.items() if name not in CONTAINERS_ONLY} == {**read, **prometheus}


def test_a_service_gives_its_engine_what_the_configuration_reads() -> None:
    defaults = {name: value for service in NAMES for name, value in SERVICES[service].variables.items()}
    storage = {"OTELCOL_STORAGE": "/var/lib/otelcol", "JAEGER_STORAGE": "/var/lib/jaeger"}
    read = {name: default for file in ("otelcol", "jaeger") for name, default in READ.findall((DIRECTORY / f"{file}.yaml").read_text())}
    assert {**defaults, **storage} == {**read, **SERVICES["prometheus"].variables}


def test_the_table_of_files_names_every_file() -> None:
    named = set(re.findall(r"`([\w.-]+\.yaml|[a-z]+/)`", README.partition("## Files")[2].partition("## Variables")[0]))
    there = {f"{path.name}/" if path.is_dir() else path.name for path in DIRECTORY.iterdir()}
    assert named == {name for name in there if name != "README.md" and not name.startswith("__")}


def settings(node: Any) -> set[str]:
    """Return the keys of a configuration that have a value of their own."""
    if isinstance(node, list):
        return set().union(*map(settings, node))
    if not isinstance(node, dict):
        return set()
    return {key for key, value in node.items() if not isinstance(value, dict)}.union(*map(settings, node.values()))


@pytest.mark.parametrize("name", ["otelcol", "jaeger", "prometheus", "tls", *TIERS])
def test_every_setting_is_explained(name: str) -> None:
    text = README + (DIRECTORY.parent / "docs" / "tls.md").read_text()
    found = settings(yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text()))
    assert found
    assert {setting for setting in found - WIRING if not re.search(rf"\b{setting}\b", text)} == set()


@pytest.mark.parametrize("name", [name for name in SNIPPETS if not name.endswith(".compose.yaml")])
def test_the_collector_takes_a_backend_of_the_readme(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SNIPPETS[name])
    variables = {variable: f"{tmp_path}/{variable.lower()}" for variable, _ in READ.findall(SNIPPETS[name])}
    for path in variables.values():
        Path(path).write_text("token")
    command = [need_engine("otelcol"), "validate", f"--config={DIRECTORY / 'otelcol.yaml'}", f"--config={tmp_path / name}"]
    environment = {**variables, "OTELCOL_STORAGE": str(tmp_path), "BACKEND_ENDPOINT": "localhost:4317"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_compose_takes_a_backend_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "honeycomb.compose.yaml").write_text(SNIPPETS["honeycomb.compose.yaml"])
    loader = Loader(tmp_path)
    otelcol = loader.load(DIRECTORY / "compose.yaml", tmp_path / "honeycomb.compose.yaml", HONEYCOMB_API_KEY="key")["services"]["otelcol"]
    assert otelcol["command"] == ["--config=/etc/otel-dflash/otelcol.yaml", "--config=/etc/otel-dflash/honeycomb.yaml"]
    assert otelcol["environment"]["HONEYCOMB_API_KEY"] == "key"
    assert {mount["target"] for mount in otelcol["volumes"]} == {
        "/etc/otel-dflash/honeycomb.yaml",
        "/etc/otel-dflash/otelcol.yaml",
        "/var/lib/otelcol",
    }
