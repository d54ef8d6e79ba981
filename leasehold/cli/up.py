"""`leasehold up`: the options, and what they mean; leasehold/local_stack does the rest."""

import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from leasehold.cli.failure import fail, say
from leasehold.local_stack.plan import DEFAULT_BASE_PORT, HIGHEST_BASE_PORT, Plan, Stack, faults_of_urls


def default_data_directory() -> Path:
    """Where the state of a user's programs belongs."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "leasehold"


Data = Annotated[
    Path | None,
    typer.Option(help="The directory that is kept between runs. [default: leasehold in your state directory]"),
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
Wan = Annotated[bool, typer.Option("--wan", help="Put regions and coordinator 80 to 200 ms apart, there and back.")]
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
        help="Use this Redis as the store of a region, instead of starting one; may be repeated.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew: everything in the data directory is lost.")]
Json = Annotated[bool, typer.Option("--json", help="When ready, print what is in stack.json and nothing else.")]


def up(
    data: Data = None,
    port: Port = DEFAULT_BASE_PORT,
    wan: Wan = False,
    postgres: Postgres = None,
    store: Stores = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Run everything on this machine, until Ctrl-C: Postgres, three stores, the coordinator, three agents."""
    began = time.monotonic()
    stores = dict(_region_and_url(text) for text in store or [])
    for fault in faults_of_urls(postgres, stores):
        fail(fault)
    plan = Plan((data or default_data_directory()).absolute(), port, wan, fresh, postgres, stores)

    from leasehold.local_stack.data_directory import CannotStart
    from leasehold.local_stack.launcher import up as run_stack

    def announce(stack: Stack) -> None:
        from leasehold.local_stack.screen import show

        typer.echo(json.dumps(stack)) if as_json else show(stack, plan.data, time.monotonic() - began)

    try:
        ended_well = run_stack(plan, announce, say)
    except CannotStart as error:
        fail(str(error))
    if not ended_well:
        raise typer.Exit(1)


def _region_and_url(text: str) -> tuple[str, str]:
    region, equals, url = text.partition("=")
    if not equals:
        fail("--store: it must look like REGION=URL")
    return region, url
