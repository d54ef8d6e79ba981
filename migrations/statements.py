"""Run SQL in a migration: as a script of several statements, which a prepared statement cannot be."""

from importlib.resources import files

from alembic import op


def execute(sql: str) -> None:
    """Run the statements in the migration's transaction; print them where alembic only prints."""
    if op.get_context().as_sql:
        op.execute(sql)
        return
    connection = op.get_bind().connection.dbapi_connection
    assert connection is not None
    connection.run_async(lambda driver: driver.execute(sql))


def statements_of(path: str) -> str:
    """Return the statements of a file of this package."""
    return files(__package__).joinpath(path).read_text(encoding="utf-8")
