"""Tables: at full width in a pipe, folded in a terminal, and never cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from otel_dflash.views.table import Table


def engines() -> Table:
    table = Table("<service", "<state", "pid", "of\nwall", "<addresses")
    table.add_row(
        Text("otelcol", style="bold"), "healthy", "12", ["12.5 %", "1.00 s"], "[::1]:4317 [::1]:4318"
    )
    table.add_row("jaeger", "not started", "", "-", "http://127.0.0.1:16686")
    return table


def shown(table: Table, width: int, is_terminal: bool = True) -> str:
    file = io.StringIO()
    table.print(Console(file=file, width=width, force_terminal=is_terminal, color_system=None))
    return file.getvalue()


WHOLE = """\
                               of
service  state        pid    wall  addresses
─────────────────────────────────────────────────────────
otelcol  healthy       12  12.5 %  [::1]:4317 [::1]:4318
                           1.00 s
jaeger   not started            -  http://127.0.0.1:16686
"""


@pytest.mark.parametrize(("width", "is_terminal"), [(20, False), (57, True), (200, True)])
def test_a_table_that_fits_or_goes_to_a_pipe_has_a_line_a_row(width: int, is_terminal: bool) -> None:
    assert shown(engines(), width, is_terminal) == WHOLE


def test_text_in_the_last_column_wraps_between_words() -> None:
    table = Table("<a", "b", "<text")
    table.add_row("name", "1", "three words or so")
    assert shown(table, 15) == (
        "a     b  text\n───────────────\nname  1  three\n         words\n         or so\n"
    )


def test_a_row_that_does_not_fit_continues_below_its_first_cell() -> None:
    assert (
        shown(engines(), 50)
        == """\
service
                        of
  state        pid    wall  addresses
──────────────────────────────────────────────────
otelcol
  healthy       12  12.5 %  [::1]:4317 [::1]:4318
                    1.00 s
jaeger
  not started            -  http://127.0.0.1:16686
"""
    )


def test_no_word_and_no_number_is_cut_however_narrow_the_terminal_is() -> None:
    for width in range(1, 60):
        text = shown(engines(), width)
        assert "".join(text.split()).count("notstarted") == 1
        for word in ("otelcol", "healthy", "12.5%", "1.00s", "http://127.0.0.1:16686"):
            assert word in "".join(text.split()), width


def test_a_table_without_names_has_no_header() -> None:
    table = Table("<", "<")
    table.add_row("run", "night-7 on node-a")
    table.add_row("losses", ["none", "  at all"])
    assert shown(table, 80) == "run     night-7 on node-a\nlosses  none\n          at all\n"
    assert shown(table, 18) == "run     night-7 on\n        node-a\nlosses  none\n          at all\n"
