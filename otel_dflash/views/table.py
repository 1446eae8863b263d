"""Tables for people: at full width in a pipe, folded to the width of a terminal. Nothing is ever cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from otel_dflash.console import printable

GAP: Final = 2  # spaces between columns
INDENT: Final = 2  # of a row's further lines in a terminal that is too narrow for one
WORD_WIDTH_MAX: Final = 30  # a longer word, such as a path, may be folded


def styled(text: str | Sequence[str], style: str = "") -> Text:
    """Return a text, or the lines of one, to print. It holds no markup, and what could control a terminal is
    escaped."""
    lines = [text] if isinstance(text, str) else text
    return Text("\n".join(map(printable, lines)), style)


class Table:
    """Rows of cells below a header; a cell may have several lines.

    In a terminal too narrow for a row, the last column wraps if it holds text. Where that is not enough, the
    first cell gets a line of its own, and the others follow on as many lines as they need.
    """

    def __init__(self, *columns: str) -> None:
        """Name the columns: "<" before a name aligns left, else right. Without a name there is no header."""
        self._alignments = ["left" if name.startswith("<") else "right" for name in columns]
        names = [name.removeprefix("<") for name in columns]
        self._header = [Text(name, style="bold") for name in names] if any(names) else None
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Sequence[str] | Text) -> None:
        """Add a row with a cell for each column: a text, the lines of one, or what `styled` returns."""
        self._rows.append([cell if isinstance(cell, Text) else styled(cell) for cell in cells])

    def print(self, console: Console) -> None:
        """Print the table, without spaces at the ends of lines."""
        room = console.width if console.is_terminal else None
        widths = self._natural_widths()
        groups = self._groups(widths, room)
        if room is not None:
            self._limit(widths, groups, room)
        if self._header:
            for line in self._lines(self._header, widths, groups, console, is_header=True):
                console.print(line, soft_wrap=True)
            console.print(Text("─" * max(_width(group, widths) for group in groups)), soft_wrap=True)
        for row in self._rows:
            for line in self._lines(row, widths, groups, console):
                console.print(line, soft_wrap=True)

    def _all_rows(self) -> list[list[Text]]:
        return [*([self._header] if self._header else []), *self._rows]

    def _natural_widths(self) -> list[int]:
        rows = self._all_rows()
        return [
            max((line.cell_len for row in rows for line in row[column].split(allow_blank=True)), default=0)
            for column in range(len(self._alignments))
        ]

    def _longest_word(self) -> int:
        """Return the least width of the last column, if it holds text."""
        words = (cell_len(word) for row in self._all_rows() for word in row[-1].plain.split())
        return min(max(words, default=0), WORD_WIDTH_MAX)

    def _groups(self, widths: list[int], room: int | None) -> list[list[int]]:
        """Return the columns of each line that a row takes."""
        columns = list(range(len(widths)))
        least = list(widths)
        if self._alignments[-1] == "left":
            least[-1] = self._longest_word()
        if room is None or _width(columns, least) <= room:
            return [columns]
        groups = [columns[:1]]
        for column in columns[1:]:
            if len(groups) > 1 and _width([*groups[-1], column], least) <= room:
                groups[-1].append(column)
            else:
                groups.append([column])
        return groups

    def _limit(self, widths: list[int], groups: list[list[int]], room: int) -> None:
        """Let text that is too wide for its line wrap."""
        for group in groups:
            last = group[-1]
            if self._alignments[last] == "left":
                widths[last] = max(1, min(widths[last], room - (_width(group, widths) - widths[last])))

    def _lines(
        self,
        cells: Sequence[Text],
        widths: list[int],
        groups: list[list[int]],
        console: Console,
        is_header: bool = False,
    ) -> Iterator[Text]:
        """Yield a row's lines. A header's cells end on its last line, those of a row start on its first."""
        for group in groups:
            wrapped = {column: list(cells[column].wrap(console, widths[column] or 1)) for column in group}
            height = max(map(len, wrapped.values()))
            for number in range(height):
                line = Text(" " * _indent(group))
                for column in group:
                    skipped = height - len(wrapped[column]) if is_header else 0
                    lines = wrapped[column]
                    part = lines[number - skipped] if 0 <= number - skipped < len(lines) else Text()
                    part.align("left" if self._alignments[column] == "left" else "right", widths[column])
                    line.append_text(part)
                    line.append(" " * GAP)
                line.rstrip()
                if line.plain:
                    yield line


def _width(group: Sequence[int], widths: Sequence[int]) -> int:
    return _indent(group) + sum(widths[column] for column in group) + GAP * (len(group) - 1)


def _indent(group: Sequence[int]) -> int:
    return 0 if group[0] == 0 else INDENT
