from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from otel_dflash.recording.delivery import (
    DeliveryReport,
    RecordingLosses,
    SampledSpans,
    SignalDelivery,
    read_delivery,
)
from otel_dflash.session import DELIVERY_FILE

REPORT = DeliveryReport(
    {
        "spans": SignalDelivery(
            False, 3, 1, ["one"], 7, "UNAVAILABLE", SampledSpans("ratio", ["slow"], 5, {"slow": 2}, 0)
        ),
        "metrics": SignalDelivery(True, 0, 0, [], 0, None),
    },
    RecordingLosses(4, 1),
)


def test_what_an_agent_reports_is_read_back(tmp_path: Path) -> None:
    for report in (REPORT, DeliveryReport({}), DeliveryReport({"metrics": REPORT.signals["metrics"]})):
        report.write(tmp_path)
        assert read_delivery(tmp_path) == report


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"spans": 3}',
        '{"recording": [1]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_report_is_as_none(text: str, tmp_path: Path) -> None:
    assert read_delivery(tmp_path) == DeliveryReport({})
    (tmp_path / "delivery.json").write_text(text)
    assert read_delivery(tmp_path) == DeliveryReport({})


def test_a_damaged_field_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    damaged = {"spans": {"delivered": False, "reason": "refused", "losses": 5}, "metrics": {"pending": "x"}}
    (tmp_path / DELIVERY_FILE).write_text(json.dumps(damaged))
    whole = SignalDelivery(delivered=True, failures=0, unusable_records=0, losses=[], pending=0, reason=None)
    assert read_delivery(tmp_path) == DeliveryReport(
        {"spans": replace(whole, delivered=False, reason="refused"), "metrics": whole}
    )
