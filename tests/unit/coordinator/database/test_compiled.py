"""Statements that SQLAlchemy composes are compiled to the form that asyncpg takes."""

import pytest
from sqlalchemy import BigInteger, Text, select

from coordinator.database.compiled import CompiledStatement, compiled, constant, json_text, parameter
from coordinator.database.tables import audit, transfer

AFTER = parameter("after", BigInteger)


def test_parameters_are_numbered_and_named() -> None:
    named = select(audit.c.id).where(audit.c.id > AFTER, audit.c.actor == parameter("actor", Text), audit.c.id != AFTER)
    statement = compiled(named)
    assert statement.sql.endswith("audit.id > $1::BIGINT AND audit.actor = $2::VARCHAR AND audit.id != $1::BIGINT")
    assert statement.names == ("after", "actor")


def test_values_follow_the_names_of_parameters() -> None:
    statement = CompiledStatement("SELECT $1, $2", ("after", "actor"))
    assert statement.with_values(actor="a", after=1, before=2) == ["SELECT $1, $2", 1, "a"]
    with pytest.raises(KeyError, match="actor"):
        statement.with_values(after=1)


def test_constants_stand_in_the_text() -> None:
    tenant = json_text(transfer.c.dimensions, "tenant")
    usage = compiled(select(tenant).where(transfer.c.dst == constant("consu'med")))
    assert usage.names == ()
    assert "transfer.dimensions ->> 'tenant'" in usage.sql
    assert "transfer.dst = 'consu''med'" in usage.sql


def test_a_value_that_would_be_cached_is_refused() -> None:
    with pytest.raises(ValueError, match="actor_1"):
        compiled(select(audit).where(audit.c.actor == "somebody"))
