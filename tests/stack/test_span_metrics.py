"""The RED metrics that Jaeger makes of spans: how many series, and for how long."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from otel_dflash.stack.engines import collector_directory
from otel_dflash.stack.services import SERVICES
from tests.running import poll
from tests.stack.conftest import Stack
from tests.stack.prometheus_api import Prometheus
from tests.stack.sending import send_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "dflash" / "train.py"
SHIPPED = {
    "metrics_expiration: 5m": "metrics_expiration: 3s",
    "metrics_flush_interval: 15s": "metrics_flush_interval: 1s",
}
SILENT_S = 6.0


def test_a_run_has_the_series_that_the_readme_says_and_is_forgotten_after_its_end(
    stack: Stack, tmp_path: Path
) -> None:
    """With seconds for the minutes of jaeger.yaml."""
    text = (collector_directory() / "jaeger.yaml").read_text()
    for long, short in SHIPPED.items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    (tmp_path / "jaeger.yaml").write_text(text)
    prometheus = Prometheus(stack.start("prometheus").url("PROMETHEUS_PORT"))
    service = replace(SERVICES["jaeger"], arguments=(f"--config={tmp_path}/jaeger.yaml",))
    jaeger = stack.start("jaeger", service=service, JAEGER_PROMETHEUS_URL=prometheus.url)
    send_run(
        tmp_path,
        jaeger.url("JAEGER_GRPC_PORT"),
        str(EXAMPLE),
        "--simulate",
        "--steps",
        "60",
        OTEL_METRICS_EXPORTER="none",
    )

    def silent() -> bool:
        found = prometheus.query("max(timestamp(traces_span_metrics_calls_total))", time.time())
        return bool(found) and time.time() - found[0][1] > SILENT_S

    poll(silent)
    ((_, count),) = prometheus.query('count({__name__=~"traces_span_metrics_.*"})', time.time())
    (said,) = re.findall(
        r"span metrics add about (\d+) for a run of the example",
        (collector_directory() / "README.md").read_text(),
    )
    assert abs(count / int(said) - 1) < 0.2
