"""`leasehold migrate`."""

import os

from leasehold.cli.failure import fail
from leasehold.local_stack.plan import URL_VARIABLE


def migrate() -> None:
    """Bring the database's schema to the newest version. It is run by the schema's owner, before the coordinators.

    The owner's URL is read from LEASEHOLD_MIGRATE_DATABASE_URL: an argument could be seen by every user of the machine.
    """
    url = os.environ.get(URL_VARIABLE)
    if not url:
        fail(
            f"{URL_VARIABLE} is not set; it must be the owner's, such as postgresql://owner:secret@127.0.0.1:5432/leasehold"
        )
    from asyncpg import InterfaceError, PostgresError
    from sqlalchemy.exc import SQLAlchemyError

    from migrations.run import upgrade

    try:
        upgrade(url)
    except (OSError, PostgresError, InterfaceError, SQLAlchemyError) as error:
        fail(f"the schema was not brought up to date, nothing was changed: {error}")
