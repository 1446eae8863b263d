"""NVML, asked in a process of its own: it blocks for ever where a driver hangs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import Final

from otel_dflash.doctor.lines import Line, ok, unknown, warning

NVML_S: Final = 10.0
REAP_S: Final = 0.5
_PROGRAM: Final = """
try:
    import pynvml
except ModuleNotFoundError:
    print("absent")
else:
    try:
        pynvml.nvmlInit()
        print("found", pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        print("failed", error)
"""


class Nvml:
    """Asks on its own while other checks go on."""

    def __init__(self) -> None:
        """Start asking."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def line(self, timeout_s: float) -> Line:
        """Return what was found, within `timeout_s`. A process that hangs in the driver is left behind: nothing can end it."""
        try:
            said = self._process.communicate(timeout=timeout_s)[0].strip()
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=REAP_S)
            return warning(
                "NVML",
                f"does not answer within {timeout_s:.2g} s: the driver hangs, and no GPU can be read; see dmesg",
            )
        word, _, rest = said.partition(" ")
        if word == "found":
            count, _, driver = rest.partition(" ")
            return ok("NVML", f"{count} GPU{'' if count == '1' else 's'}, driver {driver}")
        if word == "absent":
            return unknown("NVML", "nvidia-ml-py is not installed: no GPU can be read; pip install nvidia-ml-py")
        return unknown("NVML", f"no NVIDIA driver here: no GPU can be read ({rest or 'it crashed'})")
