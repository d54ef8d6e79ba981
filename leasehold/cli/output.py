"""What commands print: tables, live tables that fit the terminal, and one sentence on stderr when they fail."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn, TypeAlias

import typer

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

REFRESH_S = 1.0
GAP = 2
UNBOUNDED_WIDTH = 100_000

Row: TypeAlias = dict[str, str]  # by column
Watch = Annotated[
    bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C. Where there is no terminal, print once.")
]


def warn(sentence: str) -> None:
    typer.echo(f"leasehold: {sentence}", err=True)


def fail(sentence: str) -> NoReturn:
    """End the command with exit status 1."""
    warn(sentence)
    raise typer.Exit(1)


def fail_for_each(sentences: Iterable[str]) -> NoReturn:
    """Print one sentence for each reason, and end the command with exit status 1."""
    for sentence in sentences:
        warn(sentence)
    raise typer.Exit(1)


def console() -> "Console":
    """Return a console as wide as the terminal. In a pipe it breaks no text, unless COLUMNS gives a width."""
    from rich.console import Console

    is_bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(markup=False, width=None if is_bounded else UNBOUNDED_WIDTH)


def shown(value: object) -> str:
    """Return a value as a cell of a table shows it."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; or each row as lines of its own where a word, such as an id, would not fit its column."""
    from rich.table import Column, Table

    out = console()
    if len(columns) > 1 and sum(_widest_word(name, at, rows) + GAP for at, name in enumerate(columns)) > out.width:
        _print_records(columns, rows)
        return
    table = Table(*(Column(name, overflow="fold") for name in columns), box=None)
    for row in rows:
        table.add_row(*row)
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    typer.echo("\n".join(map(str.rstrip, captured.get().splitlines())))  # one long cell would pad every other line


def _widest_word(name: str, at: int, rows: Sequence[Sequence[str]]) -> int:
    texts = [name, *(row[at] for row in rows)]
    return max(len(word) for text in texts for word in text.split() or [""])


def _print_records(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    width = max(map(len, columns))
    for row in rows:
        for name, value in zip(columns, row, strict=True):
            if value:
                typer.echo(f"{name:>{width}}  {value}")
        typer.echo()


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Yield an empty file to write, which takes the place of `file` at the end, so that it is never half written.

    A file that cannot be written ends the command before anything else is done.
    """
    partial = file.with_name(f"{file.name}.part")
    try:
        partial.write_bytes(b"")
        yield partial
        partial.replace(file)
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    finally:
        if partial.exists() and not partial.stat().st_size:
            partial.unlink()


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the text of one line on the terminal. Without a terminal it prints nothing."""
    from rich.console import Console

    terminal = Console(stderr=True, markup=False)
    if not terminal.is_terminal:
        yield lambda _: None
        return
    with terminal.status("") as status:
        yield status.update


# --- live tables ------------------------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """The columns of a live table, and which of them to leave out first on a narrow terminal."""

    names: Sequence[str]
    left_out_first: Sequence[str]

    def fitting(self, rows: Sequence[Row], width: int) -> tuple[list[str], list[str]]:
        """Return the columns that have content and fit the width, and those that were left out."""
        widths = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) + GAP for name in self.names}
        shown = [name for name in self.names if any(row.get(name) for row in rows)]
        left_out = []
        for name in self.left_out_first:
            if name in shown and sum(widths[each] for each in shown) > width:
                shown.remove(name)
                left_out.append(name)
        return shown, left_out


class Section(NamedTuple):
    """A heading and the table below it."""

    heading: str
    rows: Sequence[Row]


def print_sections(read: Callable[[], Sequence[Section]], columns: Columns, empty: str, *, watch: bool) -> None:
    """Print what `read` returns, again and again with `watch`; `empty` where it returns nothing."""
    if watch and sys.stdout.isatty():
        _refresh(read, columns, empty)
        return
    out = console()
    out.print(drawn(read(), columns, empty, out.width))


def _refresh(read: Callable[[], Sequence[Section]], columns: Columns, empty: str) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=False) as live:
        try:
            while True:
                live.update(drawn(read(), columns, empty, live.console.width), refresh=True)
                time.sleep(REFRESH_S)
        except KeyboardInterrupt:
            return


def drawn(sections: Sequence[Section], columns: Columns, empty: str, width: int) -> "Group":
    from rich.console import Group
    from rich.text import Text

    parts: list[Text | Table] = [] if sections else [Text(empty)]
    for heading, rows in sections:
        shown, left_out = columns.fitting(rows, width)
        parts += [Text(heading), _unbroken(shown, rows)]
        if left_out:
            parts.append(Text(f"too narrow for: {', '.join(left_out)}"))
    return Group(*parts)


def _unbroken(columns: Sequence[str], rows: Sequence[Row]) -> "Table":
    """Return a table in which no word is broken."""
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None)
    for row in rows:
        table.add_row(*(Text(row.get(name, "")) for name in columns))
    return table
