"""Writes settings.md and api.md, which are committed: ``python -m docs.generate``"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import otel_dflash
from otel_dflash.config import SETTINGS, NumberSetting, Setting
from otel_dflash.trainer.context import ContextForm

DIRECTORY: Final = Path(__file__).parent
SIGNATURE_WIDTH: Final = 100
SECTIONS: Final = {"Args:": "Arguments:", "Returns:": "Returns:", "Raises:": "Raises:"}
BYTE_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")

SETTINGS_HEAD: Final = """\
<!-- Generated from otel_dflash/config.py: make docs -->
# Settings

A command-line flag wins over its variable, and the variable over the default. A value that cannot work is
refused before training starts, in one line that shows the value and the remedy.

| variable | meaning | values | default |
|---|---|---|---|
"""
SETTINGS_TAIL: Final = """
## OpenTelemetry's own variables

`OTEL_*` variables keep the meaning that OpenTelemetry gives them:

* `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_PROTOCOL` (flags `--endpoint`, `--protocol`): where
  telemetry is sent, over gRPC or HTTP. Without an endpoint nothing is sent, only recorded.
* `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE` and the others for TLS: [tls.md](tls.md).
* `OTEL_TRACES_SAMPLER`, `OTEL_TRACES_SAMPLER_ARG`: which traces are sent ([sampling.md](sampling.md)).
* `OTEL_TRACES_EXPORTER`, `OTEL_METRICS_EXPORTER`: another exporter than `otlp`, or `none`.
* `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`: the resource of everything that is sent.
* `OTEL_SDK_DISABLED`: `true` turns telemetry off.

The variables of the collector, Jaeger, Prometheus and Grafana are in
[collector/README.md](../collector/README.md#variables).
"""
API_HEAD: Final = """\
<!-- Generated from the docstrings of the public names: make docs -->
# API

"""
API_TAIL: Final = f"""
## Types

* `ContextForm`: `{ContextForm}`: a `Context` in any of its forms.
* `Q`: the type of the queue that `wrap_queue` takes; it returns that type.
"""


def generate() -> dict[str, str]:
    """Return the text of each generated page by file name."""
    return {"settings.md": settings_page(), "api.md": api_page()}


# --- settings.md


def settings_page() -> str:
    """Return the table of settings."""
    return SETTINGS_HEAD + "".join(map(_row, SETTINGS)) + SETTINGS_TAIL


def _row(setting: Setting | NumberSetting) -> str:
    if isinstance(setting, NumberSetting):
        unit = "" if setting.unit == "By" else f" {setting.unit}"
        low, high, default = (_number(number, setting.unit) for number in setting[3:])
        cells = [f"`{setting.variable}`", setting.meaning, f"{low} to {high}{unit}", f"{default}{unit}"]
    else:
        name = f"`{setting.variable}`" + (f", `{setting.flag}`" if setting.flag else "")
        cells = [name, setting.meaning, setting.values, f"`{setting.default}`" if setting.default else ""]
    return f"| {' | '.join(cells)} |\n"


def _number(number: int, unit: str) -> str:
    """Return a number as the variable takes it; bytes also in the largest unit that divides them."""
    if unit != "By":
        return f"{number}"
    power = max(power for power in range(len(BYTE_UNITS)) if number % 1024**power == 0)
    return f"{number} ({number // 1024**power} {BYTE_UNITS[power]})"


# --- api.md


def api_page() -> str:
    """Return the public names, in the order of `otel_dflash.__all__`."""
    names = [name for name in otel_dflash.__all__ if not name.startswith("_")]
    entries = (_entry(name, getattr(otel_dflash, name)) for name in names)
    return API_HEAD + markdown(otel_dflash.__doc__ or "") + "".join(entries) + API_TAIL


def _entry(name: str, value: Any) -> str:
    if not inspect.isclass(value):
        return section("##", name, signature(name, value), value)
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    head = f"class {name}({bases})" if bases else f"class {name}"
    attributes = inspect.get_annotations(value).items()
    fields = [f"    {attribute}: {kind}" for attribute, kind in attributes if not attribute.startswith("_")]
    return section("##", name, "\n".join([head, *fields]), value) + "".join(_members(name, value))


def _members(name: str, owner: type) -> Iterator[str]:
    for key, member in vars(owner).items():
        path, bound = f"{name.lower()}.{key}", getattr(owner, key)
        if key.startswith("_"):
            continue
        if isinstance(member, property):
            kind = inspect.signature(member.fget).return_annotation  # type: ignore[arg-type]
            yield section("###", f"{name}.{key}", f"{path}: {kind}", member)
        elif callable(bound):
            has_self = inspect.isfunction(member)
            yield section("###", f"{name}.{key}", signature(path, bound, skipped=has_self), bound)


def section(level: str, name: str, code: str, documented: Any) -> str:
    """Return a heading, the signature, and the docstring."""
    return f"\n{level} {name}\n\n```python\n{code}\n```\n\n{markdown(inspect.getdoc(documented) or '')}"


class _Annotation(str):
    """An annotation as the source has it, without quotes."""

    __repr__ = str.__str__


def signature(name: str, function: Any, skipped: int = 0) -> str:
    """Return how a function is called, without its first `skipped` parameters: in one line if it fits, else
    with one parameter a line."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_Annotation(parameter.annotation))
        for parameter in list(found.parameters.values())[skipped:]
    ]
    line = f"{name}{inspect.Signature(parameters)} -> {found.return_annotation}"
    if len(line) <= SIGNATURE_WIDTH:
        return line
    lines = [f"    {parameter}," for parameter in parameters]
    keyword_only = [parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters]
    if any(keyword_only):
        lines.insert(keyword_only.index(True), "    *,")
    return "\n".join([f"{name}(", *lines, f") -> {found.return_annotation}"])


def markdown(docstring: str) -> str:
    """Return a docstring as markdown: Google sections become lists, indented blocks become Python code."""
    blocks = re.split(r"\n\n(?=\S)", inspect.cleandoc(docstring))
    return "\n\n".join(map(_block, blocks)) + "\n"


def _block(block: str) -> str:
    head, _, items = block.partition("\n")
    if head in SECTIONS:
        return f"{SECTIONS[head]}\n\n{_list(textwrap.dedent(items))}"
    text, _, code = block.partition("\n\n")
    fence = f"\n\n```python\n{textwrap.dedent(code)}\n```" if code else ""
    return _inline(text.removesuffix(":") if text.endswith("::") else text) + fence


def _list(items: str) -> str:
    """Return a list: a line and the deeper lines below it are an item, which starts with a name."""
    lines = re.sub(r"\n +", " ", _inline(items)).split("\n")
    return "\n".join("* " + re.sub(r"^([*.\w]+):", r"`\1`:", line) for line in lines)


def _inline(text: str) -> str:
    return text.replace("``", "`")


if __name__ == "__main__":
    for name, text in generate().items():
        (DIRECTORY / name).write_text(text)
