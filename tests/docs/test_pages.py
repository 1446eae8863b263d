"""The pages: generated ones are up to date, settings are complete, and links lead somewhere."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import otel_dflash
from docs.generate import generate, markdown, section, signature
from otel_dflash.cli.main import cli
from otel_dflash.config import SETTINGS, Setting

PROJECT = Path(__file__).parents[2]
PAGES = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("collector/*.md")])


@pytest.mark.parametrize("name", ["settings.md", "api.md"])
def test_the_committed_page_is_the_generated_one(name: str) -> None:
    is_current = (PROJECT / "docs" / name).read_text() == generate()[name]
    assert is_current, "generate it again: make docs"


def test_every_type_in_a_signature_of_the_api_is_defined() -> None:
    page = (PROJECT / "docs" / "api.md").read_text()
    code = re.findall(
        r"```python\n((?:class|start|telemetry\.|worker\.|phase\.|step\.|context\.).*?)```", page, re.DOTALL
    )
    kinds = {
        name
        for block in code
        for line in re.findall(r"(?::|->) ([^=,)\n]+)", block)
        for name in re.findall(r"\w+", line)
    }
    builtin = {name for name in kinds if hasattr(builtins, name)} | {"Any", "F", "Callable"}
    defined = set(re.findall(r"(?m)^## (\w+)", page)) | set(
        re.findall(r"(?m)^\* `(\w+)`: ", page.partition("## Types")[2])
    )
    assert kinds - builtin - defined == set()
    assert {"ContextForm", "Q"} < kinds


def test_the_example_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_dflash.trainer.telemetry, "_own", otel_dflash.Telemetry())
    monkeypatch.setenv("OTEL_DFLASH_DISABLED", "true")
    (code,) = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    names["run_target"](0, [SimpleNamespace(ids=[1, 2], tokens=2)] * 3, len)
    assert [names["hidden_states"].get() for _ in range(3)] == [2, 2, 2]


def test_every_variable_of_ours_is_in_the_table_of_settings() -> None:
    sources = [*PROJECT.glob("otel_dflash/**/*.py"), *PAGES]
    used = {name for path in sources for name in re.findall(r"OTEL_DFLASH_[A-Z_]*[A-Z]", path.read_text())}
    assert used == {setting.variable for setting in SETTINGS}


def test_every_flag_in_the_table_of_settings_is_an_option_of_run() -> None:
    flags = [setting.flag for setting in SETTINGS if isinstance(setting, Setting) and setting.flag]
    shown = CliRunner().invoke(cli, ["run", "--help"]).output
    assert [flag for flag in flags if f"{flag} " not in shown] == []


class Valve:
    """Lets water through.

    Use it like this::

        valve = Valve()

        valve.open(1)
    """

    def open(
        self, share: float, *, slowly_enough_for_old_pipes: bool = True, name_in_the_log: str = "v"
    ) -> int:
        """Open it, and return the flow in ``l/s``.

        Args:
            share: How far,
                0 to 1.
            slowly_enough_for_old_pipes: Whether to wait.
            name_in_the_log: A name.

        Raises:
            ValueError: The share is out of range.
        """


def test_a_docstring_becomes_markdown() -> None:
    assert (
        (
            section("##", "Valve", "class Valve", Valve)
            + section("###", "Valve.open", signature("valve.open", Valve.open, skipped=1), Valve.open)
        )
        == """
## Valve

```python
class Valve
```

Lets water through.

Use it like this:

```python
valve = Valve()

valve.open(1)
```

### Valve.open

```python
valve.open(
    share: float,
    *,
    slowly_enough_for_old_pipes: bool = True,
    name_in_the_log: str = 'v',
) -> int
```

Open it, and return the flow in `l/s`.

Arguments:

* `share`: How far, 0 to 1.
* `slowly_enough_for_old_pipes`: Whether to wait.
* `name_in_the_log`: A name.

Raises:

* `ValueError`: The share is out of range.
"""
    )
    assert markdown("One line.") == "One line.\n"


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls a page's headings in a link."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    dead = []
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []
