"""Compile SQLAlchemy statements to text for asyncpg.

Compiling takes about a millisecond. So a function that composes a statement is cached by the shape of the question
(which filters, which columns), and the values are named parameters, given when the statement runs:

    @lru_cache(maxsize=64)
    def _entries(filters: tuple[str, ...]) -> CompiledStatement:
        return compiled(select(audit).where(*(_CONDITIONS[name] for name in filters)))

    rows = await connection.fetch(*_entries(("actors",)).with_values(actors=["…"]))
"""

from typing import Any, NamedTuple

from sqlalchemy import BindParameter, ColumnElement, SelectBase, Text, bindparam, literal
from sqlalchemy.dialects.postgresql.asyncpg import dialect

_DIALECT = dialect()  # type: ignore[no-untyped-call]


class CompiledStatement(NamedTuple):
    """SQL text, and the names of its parameters $1, $2 and so on."""

    sql: str
    names: tuple[str, ...]

    def with_values(self, **values: object) -> list[Any]:
        """Return the arguments of `connection.fetch`. A value that the statement does not name is left out."""
        return [self.sql, *(values[name] for name in self.names)]


def compiled(statement: SelectBase) -> CompiledStatement:
    """Compile a statement. All its values must be a `parameter` or a `constant`."""
    compiled_statement = statement.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})
    unnamed = [name for name, value in compiled_statement.params.items() if value is not None]
    if unnamed:
        raise ValueError(f"values in a cached statement: {unnamed}")
    return CompiledStatement(str(compiled_statement), tuple(compiled_statement.positiontup or ()))


def parameter(name: str, type_: Any) -> BindParameter[Any]:
    """Return a value that is given when the statement runs."""
    return bindparam(name, type_=type_, required=False)


def constant(value: str | int) -> ColumnElement[Any]:
    """Return a value that stands in the SQL text, where the planner sees it: a partial index may need it."""
    return literal(value, literal_execute=True)


def json_text(column: ColumnElement[Any], key: str) -> ColumnElement[str]:
    """Return a value of a JSON object as text."""
    return column.op("->>", return_type=Text())(constant(key))
