"""`leasehold migrate`."""

import os

from leasehold.cli.failure import fail, say
from leasehold.local_stack.plan import COORDINATOR_URL_VARIABLE, URL_VARIABLE


def migrate() -> None:
    """Bring the database's schema to the newest version. It is run by the schema's owner, before the coordinators.

    The owner's URL is read from LEASEHOLD_MIGRATE_DATABASE_URL: an argument could be seen by every user of the machine.
    With LEASEHOLD_MIGRATE_COORDINATOR_URL, the URL that coordinators will be told, the user that it names is made, or
    given its password, and may do what a coordinator needs and nothing else.
    """
    url = os.environ.get(URL_VARIABLE)
    if not url:
        fail(
            f"{URL_VARIABLE} is not set; it must be the owner's, such as postgresql://owner:secret@127.0.0.1:5432/leasehold"
        )
    from asyncpg import InterfaceError, PostgresError
    from sqlalchemy.exc import SQLAlchemyError

    from migrations.roles import COORDINATOR, RoleMissing
    from migrations.run import SchemaIsNewer, upgrade

    try:
        if not upgrade(url, os.environ.get(COORDINATOR_URL_VARIABLE) or None):
            say(
                f"the schema is up to date, but the role {COORDINATOR} does not exist, and this owner may not create "
                f"roles: have somebody run CREATE ROLE {COORDINATOR} NOLOGIN, and migrate again"
            )
    except (RoleMissing, SchemaIsNewer, OSError, PostgresError, InterfaceError, SQLAlchemyError) as error:
        fail(f"the schema was not brought up to date, nothing was changed: {error}")
