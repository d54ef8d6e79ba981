"""Fixtures of the tests of an agent, which read the database behind the coordinator of their world."""

import pytest


@pytest.fixture
def database(world_database: str) -> str:
    """Yield a connection to the database of the coordinator of the test's world."""
    return world_database
