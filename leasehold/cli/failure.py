"""How a command fails: one sentence on stderr, and exit status 1."""

from collections.abc import Callable
from typing import NoReturn

import typer


def say(sentence: str) -> None:
    typer.echo(f"leasehold: {sentence}", err=True)


def fail(sentence: str) -> NoReturn:
    say(sentence)
    raise typer.Exit(1)


def run_service(run: Callable[[], None]) -> None:
    """Until it is told to end. What a person has to put right is said, and not traced."""
    from web.serving import CannotListen
    from web.settings import SettingsError

    try:
        run()
    except (SettingsError, CannotListen) as error:
        fail(str(error))
