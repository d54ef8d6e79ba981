"""What alembic runs for each command: on the connection that `migrations.run` hands over, in one transaction."""

from alembic import context
from sqlalchemy import Connection


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=None, transaction_per_migration=False)
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
