"""How a migration runs its SQL: as a script of several statements, which a prepared statement cannot be."""

from alembic import op


def execute(sql: str) -> None:
    """Runs the statements in the transaction of the migration; as text where alembic only prints."""
    if op.get_context().as_sql:
        op.execute(sql)
        return
    connection = op.get_bind().connection.dbapi_connection
    assert connection is not None
    connection.run_async(lambda driver: driver.execute(sql))
