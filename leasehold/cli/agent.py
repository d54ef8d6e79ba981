"""`leasehold agent`."""

from functools import partial
from typing import Annotated

import typer

from leasehold.cli.failure import run_service

Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="How many processes answer on its one port; else what LEASEHOLD_AGENT_WORKERS says, or 1.",
    ),
]


def agent(workers: Workers = None) -> None:
    """Run a region's agent. Its settings are environment variables that begin with LEASEHOLD_AGENT_."""
    from regional_agent.main import run

    run_service(partial(run, workers))
