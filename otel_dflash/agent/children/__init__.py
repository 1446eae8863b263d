"""Child processes, for calls that may hang for ever. A new one is a file here and a line in CHILDREN."""

from __future__ import annotations

from typing import Final

CHILDREN: Final = {
    "nvml": "otel_dflash.agent.children.nvml",
}
"""Name -> the module that the child runs. It imports the standard library and the package that may hang."""
