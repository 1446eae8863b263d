"""Writes dashboards/*.json, which are committed: ``python -m collector.grafana.dashboards``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from collector.grafana.gpus import GPUS
from collector.grafana.pipeline import PIPELINE
from collector.grafana.telemetry import TELEMETRY

DIRECTORY: Final = Path(__file__).parent / "dashboards"
DASHBOARDS: Final = (PIPELINE, GPUS, TELEMETRY)


def generate() -> dict[str, str]:
    """Return the text of each file of dashboards/ by name."""
    return {
        f"{made.uid}.json": json.dumps(made.build(), cls=JSONEncoder, indent=2) + "\n" for made in DASHBOARDS
    }


if __name__ == "__main__":
    for name, text in generate().items():
        (DIRECTORY / name).write_text(text)
