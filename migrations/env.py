"""The entry point that alembic executes for each command: it runs all steps in one transaction.

`migrations.run` hands over the connection. Without one (offline mode) alembic prints the SQL, for `migrations.lint`.
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
