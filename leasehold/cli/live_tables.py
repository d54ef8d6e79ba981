"""Tables for people, once or as a view that follows: as wide as the terminal, and no word is broken."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import typer

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

WATCH_S = 1.0
GAP = 2

Row: TypeAlias = dict[str, str]  # by column
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Follow, until Ctrl-C; without a terminal, once.")]


class Columns(NamedTuple):
    names: Sequence[str]
    left_out_first: Sequence[str]  # where a terminal is too narrow for all

    def fitting(self, rows: Sequence[Row], width: int) -> tuple[list[str], list[str]]:
        """The columns in which anything stands, and which of them are left out, so that no word is broken."""
        widths = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) + GAP for name in self.names}
        shown = [name for name in self.names if any(row.get(name) for row in rows)]
        left_out = []
        for name in self.left_out_first:
            if name in shown and sum(widths[each] for each in shown) > width:
                shown.remove(name)
                left_out.append(name)
        return shown, left_out


class Block(NamedTuple):
    """A table, and the line above it."""

    heading: str
    rows: Sequence[Row]


def show_tables(look: Callable[[], Sequence[Block]], columns: Columns, nothing: str, *, watch: bool) -> None:
    """`nothing`: what is said where there is none."""
    if watch and sys.stdout.isatty():
        _follow(look, columns, nothing)
        return
    from rich.console import Console

    console = Console(markup=False)
    console.print(drawn(look(), columns, nothing, console.width))


def _follow(look: Callable[[], Sequence[Block]], columns: Columns, nothing: str) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=False) as live:
        try:
            while True:
                live.update(drawn(look(), columns, nothing, live.console.width), refresh=True)
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            return


def drawn(blocks: Sequence[Block], columns: Columns, nothing: str, width: int) -> "Group":
    from rich.console import Group
    from rich.text import Text

    parts: list[Text | Table] = [] if blocks else [Text(nothing)]
    for heading, rows in blocks:
        shown, left_out = columns.fitting(rows, width)
        parts += [Text(heading), _table(shown, rows)]
        if left_out:
            parts.append(Text(f"too narrow for: {', '.join(left_out)}"))
    return Group(*parts)


def _table(columns: Sequence[str], rows: Sequence[Row]) -> "Table":
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None)
    for row in rows:
        table.add_row(*(Text(row.get(name, "")) for name in columns))
    return table
