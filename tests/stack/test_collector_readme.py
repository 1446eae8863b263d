"""collector/README.md is true: its variables are those that are read, and the collector and Compose take its
files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_dflash.stack.engines import collector_directory
from otel_dflash.stack.native import NAMES
from otel_dflash.stack.services import SERVICES, wait_healthy
from tests.collector.compose import Loader
from tests.running import poll
from tests.stack.conftest import READ, Stack, end_with_this_process, free_ports, need_engine
from tests.stack.host import Host
from tests.stack.prometheus_api import Prometheus

DIRECTORY = collector_directory()
README = (DIRECTORY / "README.md").read_text()
SNIPPETS = dict(re.findall(r"```yaml\n# (\S+)\n(.*?)```", README, re.DOTALL))
BACKENDS = {name: text for name, text in SNIPPETS.items() if name != "alertmanagers.yaml"}
WIRING = {
    *(
        "receivers",
        "processors",
        "exporters",
        "extensions",
        "endpoint",
        "hostnames",
        "trace_storage",
        "topic",
        "topics",
        "encoding",
    ),
    *(
        "name",
        "service.name",
        "action",
        "type",
        "value",
        "keys",
        "values",
        "attributes.key",
        "image",
        "entrypoint",
        "volumes",
        "ports",
    ),
    *(
        "depends_on",
        "condition",
        "test",
        "--config",
        "--config.file",
        "--storage.tsdb.path",
        "apiVersion",
        "url",
        "options.path",
    ),
    *(
        "OTELCOL_STORAGE",
        "OTELCOL_TRACES_ENDPOINT",
        "OTELCOL_METRICS_ENDPOINT",
        "KAFKA_BROKERS",
        "JAEGER_STORAGE",
    ),
    *("GRAFANA_JAEGER_URL", "GRAFANA_PROMETHEUS_URL"),
}
"""Settings that say what is connected to what, and where: the files themselves."""
DATA = {"builder.yaml", "alerts.yaml", "alerts_test.yaml", "alertmanagers.yaml"}
"""No settings: what the collector is made of, rules, their tests, addresses."""
FILES = sorted({str(path.relative_to(DIRECTORY)) for path in DIRECTORY.rglob("*.yaml")} - DATA)
VARIABLE = re.compile(r"\$\{?(?:env:)?([A-Z_]+)")
CONTAINERS_ONLY = {"GRAFANA_PORT", "GRAFANA_ADMIN_PASSWORD"}


def test_the_table_of_variables_is_what_the_configurations_read() -> None:
    table = dict(re.findall(r"^\| `([A-Z_]+)` \| (\S+) \|", README, re.MULTILINE))
    read = {
        name: default
        for file in ("otelcol", "jaeger")
        for name, default in READ.findall((DIRECTORY / f"{file}.yaml").read_text())
    }
    prometheus = SERVICES["prometheus"].variables
    assert {name: default for name, default in table.items() if name not in CONTAINERS_ONLY} == {
        **read,
        **prometheus,
    }


def test_a_service_gives_its_engine_what_the_configuration_reads() -> None:
    defaults = {name: value for service in NAMES for name, value in SERVICES[service].variables.items()}
    storage = {"OTELCOL_STORAGE": "/var/lib/otelcol", "JAEGER_STORAGE": "/var/lib/jaeger"}
    read = {
        name: default
        for file in ("otelcol", "jaeger")
        for name, default in READ.findall((DIRECTORY / f"{file}.yaml").read_text())
    }
    assert {**defaults, **storage} == {**read, **SERVICES["prometheus"].variables}


def test_the_table_of_files_names_every_file() -> None:
    named = set(
        re.findall(r"`([\w.-]+\.yaml|[a-z]+/)`", README.partition("## Files")[2].partition("## Variables")[0])
    )
    there = {f"{path.name}/" if path.is_dir() else path.name for path in DIRECTORY.iterdir()}
    assert named == {name for name in there if name != "README.md" and not name.startswith("__")}


def settings(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a configuration sets: the dotted path of each key that has a value of its own, or a flag,
    and the value."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from settings(value, f"{path}.{key}")
    elif isinstance(node, list) and all(
        isinstance(item, dict) or str(item).startswith("--") for item in node
    ):
        for item in node:
            flag, _, value = item.partition("=") if isinstance(item, str) else ("", "", "")
            yield from [(f"{path}.{flag}", value)] if flag else settings(item, path)
    elif node is not None:
        yield path, node


def explanations(file: str) -> dict[str, Any]:
    """Return what the rows below the headings that name a file explain: the end of a setting's path, and its
    value or None."""
    found: dict[str, Any] = {}
    for section in re.split(r"^#+ ", README, flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        if f"`{file}`" not in heading:
            continue
        for cell in re.findall(r"^\| (.+?) \|", body, re.MULTILINE):
            for setting in re.findall(r"`([^`]+)`", cell):
                key, given, value = re.fullmatch(r"(--[\w.-]+|[^:]+)(: |=)?(.*)", setting).groups()  # type: ignore[union-attr]
                found[key] = (value if given == "=" else yaml.safe_load(value)) if given else None
    return found


def ends(path: str, keys: Iterable[str]) -> list[str]:
    """Return which of the keys a path ends with, the longest first."""
    return sorted((key for key in keys if path.endswith(f".{key}")), key=len, reverse=True)


def load(file: str) -> list[tuple[str, Any]]:
    return [
        (path, value)
        for path, value in settings(yaml.safe_load((DIRECTORY / file).read_text()))
        if not ends(path, WIRING)
    ]


@pytest.mark.parametrize("file", FILES)
def test_every_setting_has_a_row_of_its_file_with_its_value(file: str) -> None:
    """What comes from the environment is explained by its variable."""
    variables = set(re.findall(r"`([A-Z_]+)`", README + (DIRECTORY.parent / "docs" / "tls.md").read_text()))
    rows = explanations(file)
    found = load(file)
    assert found

    def is_explained(path: str, value: Any) -> bool:
        if read := VARIABLE.findall(str(value)):
            return variables.issuperset(read)
        row = ends(path, rows)
        return bool(row) and rows[row[0]] in (None, value)

    assert [setting for setting in found if not is_explained(*setting)] == []


def test_every_row_is_of_a_setting_that_is_there() -> None:
    rows = {(key, str(value)) for file in FILES for key, value in explanations(file).items()}
    used = {
        (key, str(explanations(file)[key]))
        for file in FILES
        for path, _ in load(file)
        for key in ends(path, explanations(file))[:1]
    }
    assert rows - used == set()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with collector/ in it, and what the README says of another backend beside that, as it
    says."""
    (tmp_path / "collector").symlink_to(DIRECTORY)
    for name, text in BACKENDS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", [name for name in BACKENDS if not name.endswith(".compose.yaml")])
def test_the_commands_of_the_readme_check_a_backend_and_start_the_collector_with_it(
    name: str, checkout: Path
) -> None:
    (checkout / "bin").mkdir()
    (checkout / "bin" / "otelcol").symlink_to(need_engine("otelcol"))
    variables = {variable: f"{checkout}/{variable.lower()}" for variable, _ in READ.findall(BACKENDS[name])}
    for path in variables.values():
        Path(path).write_text("token")
    ports = dict(
        zip(
            ("OTELCOL_GRPC_PORT", "OTELCOL_HTTP_PORT", "OTELCOL_HEALTH_PORT"),
            map(str, free_ports(3)),
            strict=True,
        )
    )
    environment = {
        **variables,
        **ports,
        "PATH": f"{checkout}/bin:{os.defpath}",
        "BACKEND_ENDPOINT": "localhost:1",
    }
    lines = re.findall(r"^(?:\S+=\S+ )?otelcol .*--config honeycomb.yaml$", README, re.MULTILINE)
    validate, start = (line.replace("honeycomb.yaml", name) for line in lines)
    command = ["bash", "-ec", validate]
    checked = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    with (checkout / "otelcol.log").open("w") as log:
        # becomes the collector
        process = subprocess.Popen(
            ["bash", "-ec", start], cwd=checkout, env=environment, stdout=log, stderr=log
        )
    guard = end_with_this_process(process.pid)
    try:
        wait_healthy(SERVICES["otelcol"], process, checkout, ports)
    finally:
        process.kill()
        process.wait()
        guard.communicate()
    assert list((checkout / "queue").iterdir()), "else it lies where only root may write"


def test_compose_takes_a_backend_of_the_readme(checkout: Path) -> None:
    (command,) = re.findall(r"`docker compose (.*honeycomb.*) up --wait`", README)
    files = [checkout / file for file in re.findall(r"-f (\S+)", command)]
    (checkout / "loader").mkdir()
    otelcol = Loader(checkout / "loader").load(*files, HONEYCOMB_API_KEY="key")["services"]["otelcol"]
    assert otelcol["command"] == [
        "--config=/etc/otel-dflash/otelcol.yaml",
        "--config=/etc/otel-dflash/honeycomb.yaml",
    ]
    assert otelcol["environment"]["HONEYCOMB_API_KEY"] == "key"
    mounts = {mount["target"]: mount["source"] for mount in otelcol["volumes"]}
    assert mounts == {
        "/etc/otel-dflash/honeycomb.yaml": str(checkout / "honeycomb.yaml"),
        "/etc/otel-dflash/otelcol.yaml": str(checkout / "collector" / "otelcol.yaml"),
        "/var/lib/otelcol": "otelcol",
    }
    assert [
        source for target, source in mounts.items() if target.endswith(".yaml") and not Path(source).is_file()
    ] == []


def test_alerts_go_to_the_alertmanagers_that_the_readme_shows_how_to_name(
    stack: Stack, tmp_path: Path
) -> None:
    """As shipped there is none, and an Alertmanager written there is taken up without a restart."""
    for name in ("prometheus.yaml", "alerts.yaml", "alertmanagers.yaml"):
        (tmp_path / name).write_text((DIRECTORY / name).read_text())
    promtool = need_engine("prometheus").with_name("promtool")
    checked = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr, "WARNING" in checked.stdout) == (0, "", False)
    shipped = SERVICES["prometheus"]
    arguments = tuple(argument.replace("{config}", str(tmp_path)) for argument in shipped.arguments)
    prometheus = Prometheus(
        stack.start("prometheus", service=replace(shipped, arguments=arguments)).url("PROMETHEUS_PORT")
    )
    assert (yaml.safe_load((DIRECTORY / "alertmanagers.yaml").read_text()), prometheus.alertmanagers()) == (
        [],
        [],
    )
    (tmp_path / "alertmanagers.yaml").write_text(SNIPPETS["alertmanagers.yaml"])
    poll(lambda: prometheus.alertmanagers() == ["http://alertmanager.example:9093/api/v2/alerts"])


def test_tempo_finds_the_network_and_the_data_source_that_the_readme_names(tmp_path: Path) -> None:
    ((alias, network),) = re.findall(r"docker network connect --alias (\S+) (\S+) CONTAINER", README)
    assert Loader(tmp_path).load(DIRECTORY / "compose.yaml")["networks"]["default"]["name"] == network
    assert f"OTELCOL_TRACES_ENDPOINT=http://{alias}:4318 " in README
    sources = yaml.safe_load(
        (DIRECTORY / "grafana" / "provisioning" / "datasources" / "otel-dflash.yaml").read_text()
    )["datasources"]
    (uid,) = re.findall(r"leading to the data source `(\S+)`", README)
    assert [source["name"] for source in sources if source["uid"] == uid] == ["Jaeger"]
    destinations = [
        one for source in sources for one in source.get("jsonData", {}).get("exemplarTraceIdDestinations", [])
    ]
    assert [destination["datasourceUid"] for destination in destinations] == [uid]


def test_the_doctor_of_the_readme_finds_what_it_sent_in_a_stack_that_is_up(engines: Host) -> None:
    assert engines.run("stack", "up", "--native")[0] == 0
    (command,) = re.findall(r"`otel-dflash (doctor --endpoint \S+)`", README)
    code, out, _ = engines.run(*command.replace(":4317", f":{engines.ports['OTELCOL_GRPC_PORT']}").split())
    assert (code, len(re.findall("seen in (?:Jaeger|Prometheus)", out))) == (0, 2), out
