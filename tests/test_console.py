"""What our lines may hold, whoever gave a part of them."""

from __future__ import annotations

import pytest

from otel_dflash.console import log, printable, report


def test_what_controls_a_terminal_is_printed_as_its_escape(capfd: pytest.CaptureFixture[str]) -> None:
    report("key \x1b[2J\x9b31m\r of 'ä'\n  its remedy\u202e")
    log("\x00")
    shown = capfd.readouterr().err.splitlines()
    assert shown[:2] == [r"otel-dflash: key \x1b[2J\x9b31m\r of 'ä'", r"  its remedy\u202e"]
    assert shown[2].endswith(r"otel-dflash agent: \x00")


def test_a_name_cannot_end_a_line() -> None:
    assert printable("a\nb\u2028c\ud800 'd'") == r"a\nb\u2028c\ud800 'd'"
