"""GPUs and their driver, asked in a child process: NVML blocks for ever where a driver hangs."""

from __future__ import annotations

from typing import Final

from otel_dflash.agent.children import CHILDREN
from otel_dflash.agent.children.child import Child, NoAnswerError
from otel_dflash.doctor.finding import Finding, ok, unknown, warning

NVML_S: Final = 10.0


class Nvml:
    """Asks on its own while other checks run."""

    def __init__(self) -> None:
        """Start to ask.

        Raises:
            OSError: No process can be started.
        """
        self._child = Child(CHILDREN["nvml"])
        self._child.request("inventory")

    def check(self, timeout_s: float) -> Finding:
        """Return what was found within `timeout_s`. A process that hangs in the driver is left alone."""
        try:
            found = self._child.answer(timeout_s)
        except NoAnswerError as error:
            remedy = "the driver hangs, see dmesg; killing that process can freeze a GPU"
            return warning(
                "NVML", f"no GPU can be read: {error}{f' ({remedy})' if error.is_abandoned else ''}"
            )
        self._child.close()
        if "missing" in found:
            return unknown(
                "NVML", f"not asked: {found['missing']} is not installed, and nothing needs it yet"
            )
        if "failure" in found:
            return unknown("NVML", f"no NVIDIA driver here: no GPU can be read ({found['failure']})")
        return ok("NVML", f"{found['gpus']} GPU{'' if found['gpus'] == 1 else 's'}, driver {found['driver']}")
