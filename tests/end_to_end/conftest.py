"""One running stack that tests share. They are of one xdist group, and each uses tenants of its own."""

from collections.abc import Iterator

import pytest

from leasehold.local_stack.processes import wait_until
from tests.end_to_end.launching import PATIENCE_S, Launcher, running


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Yield a stack that has booked usage, which is what a reader has after the quickstart."""
    with running(tmp_path_factory.mktemp("stack") / "data", "--json") as launcher:
        assert launcher.check("us-east").status == 200
        assert wait_until(lambda: launcher.consumed() == 1, PATIENCE_S)
        yield launcher
