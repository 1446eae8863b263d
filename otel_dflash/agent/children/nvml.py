"""The NVML child: queries the driver, which may block for ever."""

from __future__ import annotations

from typing import Any

from otel_dflash.agent.children.parent import Parent


def inventory(parent: Parent) -> dict[str, Any]:
    """Return {"gpus", "driver"}, {"failure"} in NVML's words, or {"missing"}: the package to install."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return {"missing": "nvidia-ml-py"}
    try:
        with parent.entering("nvmlInit"):
            pynvml.nvmlInit()
        with parent.entering("nvmlDeviceGetCount"):
            gpus = pynvml.nvmlDeviceGetCount()
        with parent.entering("nvmlSystemGetDriverVersion"):
            driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return {"failure": str(error)}
    return {"gpus": gpus, "driver": driver}


if __name__ == "__main__":
    Parent().serve({"inventory": inventory})
