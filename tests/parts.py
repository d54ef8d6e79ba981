"""Parts that tests fetch by themselves (`tools/parts.py`)."""

import os
import shutil
from pathlib import Path

import pytest

from tests import budget
from tools.parts import CannotFetch, LacksHistory, fetch, find_or_fetch_without_root


def part(name: str) -> Path:
    """Return where a part is. In CI it is installed if need be, and a test without its part fails.

    Elsewhere a test installs nothing into the machine, and without its part it is skipped with the reason. So it is in
    CI if the repository was copied without its history.
    """
    if not budget.is_full():
        pytest.fail(f"a short run fetches nothing, and {name} would be: mark the test `extended`")
    if os.environ.get("CI") == "true":
        try:
            return fetch(name)
        except LacksHistory as error:
            pytest.skip(str(error))
        except CannotFetch as error:
            pytest.fail(f"CI runs every test, and {error}")
    try:
        return find_or_fetch_without_root(name)
    except CannotFetch as error:
        pytest.skip(str(error))


def toolchain(program: str) -> str:
    """Return a compiler or runtime of the machine. Without it a test fails in CI, and is skipped elsewhere."""
    found = shutil.which(program)
    if found is None:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"this machine has no {program}")
    return found
