"""The tests of an agent look into the database behind the coordinator of their world."""

import pytest


@pytest.fixture
def database(world_database: str) -> str:
    """The database behind the coordinator of the test's world."""
    return world_database
