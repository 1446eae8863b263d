"""compose.yaml runs what is tested: the versions, the flags, the variables and the health checks of the built
engines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from otel_dflash.stack.engines import ENGINES, collector_directory
from otel_dflash.stack.native import DERIVED, NAMES
from otel_dflash.stack.services import SERVICES
from tests.collector.compose import ComposeError, Loader

FILE = collector_directory() / "compose.yaml"
COLLECTORS = {
    "": {"otelcol"},
    "compose.gateway.yaml": {"otelcol", "gateway"},
    "compose.kafka.yaml": {"otelcol", "kafka-gateway"},
}
"""What is laid over compose.yaml -> the collectors that run then."""
PORTS = {
    name: port
    for service in NAMES
    for name, port in SERVICES[service].variables.items()
    if name.endswith("_PORT")
}


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    return Loader(tmp_path_factory.mktemp("loader"))


@pytest.fixture(scope="module")
def services(loader: Loader) -> Any:
    return loader.load(FILE)["services"]


def laid_over(loader: Loader, overlay: str, **variables: str) -> Any:
    return loader.load(*([FILE, FILE.with_name(overlay)] if overlay else [FILE]), **variables)["services"]


def test_it_follows_the_specification(loader: Loader) -> None:
    project = loader.load(FILE)
    assert project["name"] == "otel-dflash"
    assert sorted(project["services"]) == [
        "grafana",
        "jaeger",
        "otelcol",
        "otelcol-health",
        "prepare",
        "prometheus",
    ]


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        (
            "    restart: unless-stopped\n",
            "    restarts: unless-stopped\n",
            r"services\.[a-z-]+\.restarts false schema",
        ),
        (
            "127.0.0.1:${PROMETHEUS_PORT:-9090}:9090",
            "127.0.0.1:${PROMETHEUS_PORT:-9090}:http",
            "Invalid containerPort: http",
        ),
        (
            "prepare: {condition: service_completed_successfully}",
            "prepared: {condition: service_started}",
            "depends on undefined service",
        ),
    ],
)
def test_the_check_refuses_what_compose_refuses(
    good: str, bad: str, reason: str, loader: Loader, tmp_path: Path
) -> None:
    assert good in FILE.read_text()
    (tmp_path / "compose.yaml").write_text(FILE.read_text().replace(good, bad))
    with pytest.raises(ComposeError, match=reason):
        loader.load(tmp_path / "compose.yaml")


def test_images_are_pinned_to_the_versions_that_are_built(services: Any) -> None:
    jaeger = ENGINES["jaeger"].image
    assert {name: service["image"] for name, service in services.items() if name != "grafana"} == {
        **{name: ENGINES[name].image for name in NAMES},
        "otelcol-health": jaeger,
        "prepare": jaeger,
    }
    assert re.fullmatch(r"grafana/grafana:\d+\.\d+\.\d+", services["grafana"]["image"])
    assert [
        engine.name
        for engine in ENGINES.values()
        if engine.image.split(":")[1].removeprefix("v") != engine.version
    ] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_container_is_started_and_checked_as_the_built_engine_is(name: str, services: Any) -> None:
    service = SERVICES[name]
    container = services[name]
    inside = {variable: "0.0.0.0" for variable in service.variables if variable.endswith("_HOST")}
    values = {**service.variables, **inside, "config": "/etc/otel-dflash", "storage": "/prometheus"}
    assert container["command"] == [argument.format(**values) for argument in service.arguments]
    assert set(container.get("environment", {})) <= set(service.variables)
    check = services["otelcol-health" if name == "otelcol" else name]["healthcheck"]["test"]
    host = "otelcol" if name == "otelcol" else "127.0.0.1"
    assert check == [
        "CMD",
        "wget",
        "-qO",
        "/dev/null",
        service.health.format(**{**service.variables, **dict.fromkeys(inside, host)}),
    ]


def test_every_port_is_published_at_the_loopback_and_chosen_by_its_variable(loader: Loader) -> None:
    chosen = {name: str(int(port) + 20_000) for name, port in {**PORTS, "GRAFANA_PORT": "3000"}.items()}
    project = loader.load(FILE, **chosen)
    published = [port for service in project["services"].values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    expected = {(port, int(port) - 20_000) for port in chosen.values()}
    assert {(port["published"], port["target"]) for port in published} == expected


def test_the_services_find_each_other_and_a_backend_elsewhere_can_be_named(loader: Loader) -> None:
    hosts = {"PROMETHEUS_HOST": "prometheus", "JAEGER_HOST": "jaeger"}
    inside = {name: template.format(**{**PORTS, **hosts}) for name, template in DERIVED.items()}
    elsewhere = {name: f"https://elsewhere/{name}" for name in DERIVED}
    for given, expected in (({}, inside), (elsewhere, elsewhere)):
        found = loader.load(FILE, **given)["services"]
        environment = {**found["otelcol"]["environment"], **found["jaeger"]["environment"]}
        assert {name: environment[name] for name in DERIVED} == expected


def test_what_follows_another_variable_is_what_the_service_has_by_default() -> None:
    hosts = {f"{name.upper()}_HOST": "127.0.0.1" for name in NAMES}
    followed = {name: template.format(**{**PORTS, **hosts}) for name, template in DERIVED.items()}
    assert followed == {
        name: value
        for service in NAMES
        for name, value in SERVICES[service].variables.items()
        if name in DERIVED
    }


def test_configuration_is_mounted_read_only_and_data_lies_in_volumes_of_the_images_users(
    services: Any,
) -> None:
    mounts = [mount for service in services.values() for mount in service.get("volumes", [])]
    assert [
        mount
        for mount in mounts
        if mount["type"] == "bind" and not (mount.get("read_only") and Path(mount["source"]).exists())
    ] == []
    prepared = {mount["source"]: mount["target"] for mount in services["prepare"]["volumes"]}
    assert services["prepare"]["entrypoint"] == ["chown", "-R", "10001:10001", *prepared.values()]
    users = {
        mount["source"]: name
        for name in ("otelcol", "jaeger")
        for mount in services[name]["volumes"]
        if mount["type"] == "volume"
    }
    assert users == {"otelcol": "otelcol", "jaeger": "jaeger"} == dict(zip(prepared, prepared, strict=True))
    waits = {name for name, service in services.items() if "prepare" in service.get("depends_on", {})}
    assert waits == set(users)
    stored = {services[name]["environment"][f"{name.upper()}_STORAGE"] for name in users}
    assert stored == {
        mount["target"] for name in users for mount in services[name]["volumes"] if mount["type"] == "volume"
    }


@pytest.mark.parametrize(("overlay", "collectors"), COLLECTORS.items())
def test_all_that_keep_running_have_a_health_check(
    overlay: str, collectors: set[str], loader: Loader
) -> None:
    """Of a collector a container beside it asks, so `up --wait` waits for it too."""
    services = laid_over(loader, overlay)
    assert {name for name, service in services.items() if "healthcheck" not in service} == {
        "prepare",
        *collectors,
    }
    for name in collectors:
        beside = services[f"{name}-health"]
        assert beside["healthcheck"] == {
            **services["prometheus"]["healthcheck"],
            "test": ["CMD", "wget", "-qO", "/dev/null", f"http://{name}:13133/"],
        }
        assert beside == {
            **services["otelcol-health"],
            "healthcheck": beside["healthcheck"],
            "depends_on": beside["depends_on"],
        }
        assert list(beside["depends_on"]) == [name]


@pytest.mark.parametrize(("overlay", "collectors"), COLLECTORS.items())
def test_queue_and_memory_are_chosen_by_their_variables_for_every_collector(
    overlay: str, collectors: set[str], loader: Loader
) -> None:
    chosen = {"OTELCOL_QUEUE_BYTES": "1000", "OTELCOL_MEMORY_MIB": "2"}
    for given, expected in (
        ({}, {name: SERVICES["otelcol"].variables[name] for name in chosen}),
        (chosen, chosen),
    ):
        services = laid_over(loader, overlay, **given)
        found = {
            name: {variable: services[name]["environment"].get(variable) for variable in chosen}
            for name in collectors
        }
        assert found == dict.fromkeys(collectors, expected)
