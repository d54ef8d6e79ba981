"""`leasehold coordinator`, `leasehold agent` and `leasehold migrate`: the processes of an installation."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from leasehold.cli.environment import secret_of
from leasehold.cli.output import fail, warn
from leasehold.local_stack.plan import COORDINATOR_URL_VARIABLE, URL_VARIABLE

commands = typer.Typer()


@commands.command()
def coordinator() -> None:
    """Run a coordinator. Its settings are environment variables that begin with LEASEHOLD_COORDINATOR_."""
    from coordinator.main import run

    _run(run)


@commands.command()
def agent(
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many processes share the port.", show_default="LEASEHOLD_AGENT_WORKERS, or 1"
        ),
    ] = None,
) -> None:
    """Run a region's agent. Its settings are environment variables that begin with LEASEHOLD_AGENT_."""
    from regional_agent.main import run

    _run(partial(run, workers))


def _run(service: Callable[[], None]) -> None:
    """Run a service until it is stopped. Print wrong settings and a used port as a sentence, without a traceback."""
    from web.serving import CannotListen
    from web.settings import SettingsError

    try:
        service()
    except (SettingsError, CannotListen) as error:
        fail(str(error))


@commands.command()
def migrate() -> None:
    """Bring the database's schema to the newest version. Run it as the owner of the schema, before the coordinators.

    The owner's URL is read from LEASEHOLD_MIGRATE_DATABASE_URL: an argument could be seen by every user of the machine.
    LEASEHOLD_MIGRATE_COORDINATOR_URL is the URL that coordinators will use. Its user is created, or gets its password,
    and may do what a coordinator needs and nothing else.
    """
    url = owners_url()
    from asyncpg import InterfaceError, PostgresError
    from sqlalchemy.exc import SQLAlchemyError

    from migrations.revisions import known_revisions
    from migrations.roles import COORDINATOR, RoleMissing
    from migrations.run import AgentsTooOld, SchemaIsNewer, upgrade

    try:
        if not upgrade(url, secret_of(COORDINATOR_URL_VARIABLE)):
            warn(
                f"the schema is up to date, but the role {COORDINATOR} does not exist, and this owner may not create "
                f"roles: have a superuser run CREATE ROLE {COORDINATOR} NOLOGIN, and migrate again"
            )
    except (RoleMissing, SchemaIsNewer, AgentsTooOld, OSError, PostgresError, InterfaceError, SQLAlchemyError) as error:
        fail(f"the schema was not brought up to date, nothing was changed: {error}")
    typer.echo(f"the schema has revision {known_revisions()[-1]}")


def owners_url() -> str:
    """Return the URL of the database as its owner, or end the command."""
    from migrations.connect import urls_of_hosts

    url = secret_of(URL_VARIABLE)
    if not url:
        example = "postgresql://owner:secret@127.0.0.1:5432/leasehold"
        fail(f"{URL_VARIABLE} is not set; it must be the owner's, such as {example}")
    try:
        list(urls_of_hosts(url))
    except ValueError as error:
        fail(f"{URL_VARIABLE}: {error}")
    return url
