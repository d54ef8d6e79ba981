"""`leasehold env`: shell variables for the stack that `leasehold up` runs, so that nothing has to be copied."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from leasehold.cli.failure import fail
from leasehold.cli.up import default_data_directory
from leasehold.local_stack.plan import Stack

Data = Annotated[
    Path | None,
    typer.Option(help="The directory that was given to `leasehold up`. [default: leasehold in your state directory]"),
]


def env(data: Data = None) -> None:
    """Print the addresses and tokens of a running `leasehold up` for a shell: eval "$(leasehold env)"."""
    stack_file = (data or default_data_directory()).absolute() / "stack.json"
    if not stack_file.exists():
        fail(f"no stack is running ({stack_file} does not exist): start one with `leasehold up` in another terminal")
    stack = json.loads(stack_file.read_text())
    for name, value in variables(stack):
        typer.echo(f"export {name}={shlex.quote(value)}")
    typer.echo(f'export PATH={shlex.quote(str(Path(sys.executable).parent))}{os.pathsep}"$PATH"')


def variables(stack: Stack) -> Iterator[tuple[str, str]]:
    """Yield what commands and examples read: the coordinator, the agents by region, and the tokens by scope.

    LEASEHOLD_TOKEN may do everything but act for a region, so that every command works with it.
    """
    yield "LEASEHOLD_URL", stack["coordinator"]
    yield "LEASEHOLD_TOKEN", stack["tokens"]["admin"]
    for region, url in stack["agents"].items():
        yield f"AGENT_{_as_name(region)}", url
    for scope, token in stack["tokens"].items():
        yield f"{_as_name(scope)}_TOKEN", token


def _as_name(text: str) -> str:
    return re.sub(r"\W", "_", text).upper()
