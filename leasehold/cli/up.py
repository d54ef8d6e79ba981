"""`leasehold up` and `leasehold env`: run everything on one machine, and use it from a shell."""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from leasehold.cli.api import pairs
from leasehold.cli.deciding.check import AGENT_URL
from leasehold.cli.output import fail, warn
from leasehold.local_stack.plan import DEFAULT_BASE_PORT, HIGHEST_BASE_PORT, Stack, StackPlan, faults_of_urls

commands = typer.Typer()


def default_data_directory() -> Path:
    """Return the place for the state of a user's programs."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "leasehold"


Data = Annotated[
    Path | None,
    typer.Option(help="The directory that is kept between runs.", show_default="leasehold in your state directory"),
]
Port = Annotated[
    int,
    typer.Option(
        metavar="BASE",
        min=1024,
        max=HIGHEST_BASE_PORT,
        help="The coordinator's port; agents are at BASE+11 to +13, Postgres at BASE+32, stores at BASE+79 to +81.",
    ),
]
Wan = Annotated[bool, typer.Option("--wan", help="Put 80 to 200 ms between regions and coordinator, there and back.")]
Postgres = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="LEASEHOLD_UP_POSTGRES",
        help="Use this Postgres instead of starting one. Arguments can be seen by others: for a URL with a "
        "password, use the variable.",
    ),
]
Stores = Annotated[
    list[str] | None,
    typer.Option(
        metavar="REGION=URL",
        envvar="LEASEHOLD_UP_STORES",
        help="Use this Redis as the store of a region, instead of starting one; repeatable.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete everything in the data directory first.")]
Json = Annotated[bool, typer.Option("--json", help="When ready, print the content of stack.json and nothing else.")]


@commands.command()
def up(
    data: Data = None,
    port: Port = DEFAULT_BASE_PORT,
    wan: Wan = False,
    postgres: Postgres = None,
    store: Stores = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Run everything on this machine until Ctrl-C: Postgres, three stores, the coordinator, three agents."""
    began = time.monotonic()
    stores = pairs(store or [], "--store REGION=URL")
    for fault in faults_of_urls(postgres, stores):
        fail(fault)
    plan = StackPlan((data or default_data_directory()).absolute(), port, wan, fresh, postgres, stores)

    from leasehold.local_stack.data_directory import CannotStart
    from leasehold.local_stack.launcher import up as run_stack

    def announce(stack: Stack) -> None:
        from leasehold.local_stack.screen import show

        typer.echo(json.dumps(stack)) if as_json else show(stack, plan.data, time.monotonic() - began)

    try:
        ended_well = run_stack(plan, announce, warn)
    except CannotStart as error:
        fail(str(error))
    if not ended_well:
        raise typer.Exit(1)


@commands.command()
def env(
    data: Annotated[
        Path | None,
        typer.Option(help="The directory of `leasehold up`.", show_default="leasehold in your state directory"),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(metavar="REGION", help="Print also the settings of one more agent of this region, or Engine."),
    ] = None,
) -> None:
    """Print the addresses and tokens of a running `leasehold up` for a shell: eval "$(leasehold env)"."""
    stack_file = (data or default_data_directory()).absolute() / "stack.json"
    if not stack_file.exists():
        fail(f"no stack is running ({stack_file} does not exist): start one with `leasehold up` in another terminal")
    stack = json.loads(stack_file.read_text())
    if agent is not None and agent not in stack["stores"]:
        fail(f"there is no region {agent!r}; the regions are {', '.join(stack['stores'])}")
    for name, value in [*variables(stack), *(agent_settings(stack, agent) if agent else [])]:
        typer.echo(f"export {name}={shlex.quote(value)}")
    typer.echo(f'export PATH={shlex.quote(str(Path(sys.executable).parent))}{os.pathsep}"$PATH"')


def variables(stack: Stack) -> Iterator[tuple[str, str]]:
    """Yield what commands and examples read: the coordinator, the agents by region, and the tokens by scope.

    LEASEHOLD_TOKEN may do everything but act for a region, so that every command works with it.
    """
    yield "LEASEHOLD_URL", stack["coordinator"]
    yield "LEASEHOLD_TOKEN", stack["tokens"]["admin"]
    yield AGENT_URL, next(iter(stack["agents"].values()))  # which `leasehold check` asks
    for region, url in stack["agents"].items():
        yield f"AGENT_{_as_name(region)}", url
    for scope, token in stack["tokens"].items():
        yield f"{_as_name(scope)}_TOKEN", token


def agent_settings(stack: Stack, region: str) -> Iterator[tuple[str, str]]:
    """Yield the settings that an agent of the region needs, or an `Engine` in a service's own process."""
    yield "LEASEHOLD_AGENT_REGION", region
    yield "LEASEHOLD_AGENT_COORDINATOR_URL", stack["coordinator"]
    yield "LEASEHOLD_AGENT_COORDINATOR_TOKEN", stack["tokens"][f"region:{region}"]
    yield "LEASEHOLD_AGENT_STORE_URL", stack["stores"][region]


def _as_name(text: str) -> str:
    return re.sub(r"\W", "_", text).upper()
