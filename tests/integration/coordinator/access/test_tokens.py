"""The command line issues, lists and revokes tokens."""

from uuid import uuid4

import pytest

from coordinator.access.issue_token import issue_token
from coordinator.access.list_tokens import list_tokens
from coordinator.access.revoke_token import revoke_token
from tests.integration.coordinator.fixtures import NOON, connected

pytestmark = pytest.mark.anyio


async def test_a_token_is_stored_only_as_a_hash(database: str) -> None:
    async with connected(database) as connection:
        id_, token = await issue_token(connection, ["usage:read", "quota:read"], "finance", NOON)
        (row,) = await connection.fetch("SELECT token::text FROM token")
        assert token.startswith("lh_")
        assert token not in row["token"]
        (known,) = await list_tokens(connection)
        assert (known.id, known.scopes, known.note) == (id_, ["quota:read", "usage:read"], "finance")
        assert (known.created_at, known.revoked_at) == (NOON, None)


async def test_issuing_a_token_again_needs_the_same_scopes(database: str) -> None:
    async with connected(database) as connection:
        id_, token = await issue_token(connection, ["quota:read"], "", NOON)
        assert await issue_token(connection, ["quota:read"], "", NOON, token) == (id_, token)
        with pytest.raises(ValueError, match="other scopes"):
            await issue_token(connection, ["admin"], "", NOON, token)
        await revoke_token(connection, id_, NOON)
        with pytest.raises(ValueError, match="revoked"):
            await issue_token(connection, ["quota:read"], "", NOON, token)


@pytest.mark.parametrize("scopes", [[], ["root"], ["quota:read", "region:*"]])
async def test_other_scopes_are_refused(database: str, scopes: list[str]) -> None:
    async with connected(database) as connection:
        with pytest.raises(ValueError, match="scope"):
            await issue_token(connection, scopes, "", NOON)
        assert await list_tokens(connection) == []


async def test_an_unknown_token_cannot_be_revoked(database: str) -> None:
    async with connected(database) as connection:
        assert not await revoke_token(connection, uuid4(), NOON)
