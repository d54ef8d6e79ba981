"""The clients are tried against the agents of `tests/integration/regional_agent`."""

from tests.integration.regional_agent.conftest import world

__all__ = ["world"]
