"""What alembic runs for each command: on the connection that `migrations.run` hands over, in one transaction.

Without a connection (alembic's offline mode) it prints the SQL instead, which `migrations.lint` reads.
"""

from alembic import context
from sqlalchemy import Connection


def run(connection: Connection | None) -> None:
    context.configure(
        connection=connection, dialect_name="postgresql", target_metadata=None, transaction_per_migration=False
    )
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes.get("connection"))
