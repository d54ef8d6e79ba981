"""Fixtures: the clients are tested against the agents of `tests/integration/regional_agent`."""

from tests.integration.regional_agent.conftest import world

__all__ = ["world"]
