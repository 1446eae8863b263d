"""The files of the cluster tier agree with each other: compose, configurations, services of the tests, and
what the README says of them."""

from __future__ import annotations

import re

import pytest

from otel_dflash.stack.engines import ENGINES, collector_directory
from tests.collector.compose import Loader
from tests.stack.kafka_build import KAFKA
from tests.stack.nodes import TIERS

DIRECTORY = collector_directory()
IN_CONTAINERS = {"gateway": "compose.gateway.yaml", "kafka-gateway": "compose.kafka.yaml"}


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    return Loader(tmp_path_factory.mktemp("loader"))


@pytest.mark.parametrize(("name", "file"), IN_CONTAINERS.items())
def test_a_compose_file_laid_over_the_first_runs_what_is_tested(name: str, file: str, loader: Loader) -> None:
    services = loader.load(DIRECTORY / "compose.yaml", DIRECTORY / file)["services"]
    gateway = services[name]
    assert gateway["image"] == services["otelcol"]["image"] == ENGINES["otelcol"].image
    assert gateway["command"] == [
        argument.format(config="/etc/otel-dflash") for argument in TIERS[name].arguments
    ]
    assert set(gateway["environment"]) <= set(TIERS[name].variables)
    assert gateway["environment"]["OTELCOL_STORAGE"] in {mount["target"] for mount in gateway["volumes"]}
    prepared = {mount["source"]: mount["target"] for mount in services["prepare"]["volumes"]}
    assert services["prepare"]["entrypoint"] == ["chown", "-R", "10001:10001", *prepared.values()]
    assert [
        port for service in (gateway, services.get("kafka", {})) for port in service.get("ports", [])
    ] == []


def test_with_a_gateway_the_collector_sends_all_to_it(loader: Loader) -> None:
    services = loader.load(DIRECTORY / "compose.yaml", DIRECTORY / "compose.gateway.yaml")["services"]
    sent = {
        name: value
        for name, value in services["otelcol"]["environment"].items()
        if name.endswith("_ENDPOINT")
    }
    assert sent == {
        "OTELCOL_TRACES_ENDPOINT": "http://gateway:4318",
        "OTELCOL_METRICS_ENDPOINT": "http://gateway:4318",
    }
    assert services["gateway"]["environment"]["GATEWAY_BACKENDS"] == "[jaeger:14317]"


def test_with_kafka_collector_and_gateway_meet_at_the_broker_that_is_tested(loader: Loader) -> None:
    services = loader.load(DIRECTORY / "compose.yaml", DIRECTORY / "compose.kafka.yaml")["services"]
    assert services["kafka"]["image"] == KAFKA.image
    assert services["otelcol"]["command"] == ["--config=/etc/otel-dflash/kafka-node.yaml"]
    brokers = {services[name]["environment"]["KAFKA_BROKERS"] for name in ("otelcol", "kafka-gateway")}
    assert brokers == {
        services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].replace("PLAINTEXT://", "[") + "]"
    }


def test_the_readme_names_every_variable_of_the_cluster_tier() -> None:
    section = (
        (DIRECTORY / "README.md").read_text().partition("## More than one node")[2].partition("\n## ")[0]
    )
    read = {name for tier in TIERS.values() for name in tier.variables}
    assert set(re.findall(r"`([A-Z_]+)` \(", section)) == {
        name for name in read if not name.startswith("OTELCOL_")
    }
