"""How a command fails: one sentence on stderr, and exit status 1."""

from typing import NoReturn

import typer


def say(sentence: str) -> None:
    typer.echo(f"leasehold: {sentence}", err=True)


def fail(sentence: str) -> NoReturn:
    say(sentence)
    raise typer.Exit(1)
