"""A PostgreSQL for each drill: every one that the machine has."""

from pathlib import Path

import pytest

from tests.budget import cases
from tests.integration.recovery.postgres import INSTALLATIONS, Installation


@pytest.fixture(params=cases(INSTALLATIONS, short=1))
def installation(request: pytest.FixtureRequest, of_servers: Path, tmp_path: Path) -> Installation:
    directory = of_servers / f"{tmp_path.name}-{request.param}"
    directory.mkdir()
    return Installation(INSTALLATIONS[request.param], directory)
