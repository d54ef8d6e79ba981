"""`migrations/guards.json`, with which verify compares a database, equals the result of the migrations."""

import os
from pathlib import Path

import msgspec
import pytest

from coordinator.proof.verify_guards import Guards, expected_guards, read_guards
from migrations.revisions import known_revisions
from tests.integration.coordinator.fixtures import connected

pytestmark = pytest.mark.anyio
FILE = Path(__file__).parents[2] / "migrations" / "guards.json"


async def test_the_guards_are_those_of_the_newest_migration(database: str) -> None:
    """Run `./dev guards` after a new migration."""
    async with connected(database) as owner:
        made = Guards(known_revisions()[-1], dict(sorted((await read_guards(owner)).items())))
    if "LEASEHOLD_WRITE_GUARDS" in os.environ:
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(made)) + b"\n")
    assert expected_guards() == made
