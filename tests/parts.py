"""Parts that tests fetch by themselves (`tools/parts.py`)."""

import os
from pathlib import Path

import pytest

from tools.parts import CannotFetch, fetch


def part(name: str) -> Path:
    """Return the directory of a part. Where it cannot be had the test is skipped with the reason, but fails in CI."""
    try:
        return fetch(name)
    except CannotFetch as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI runs every test, and {error}")
        pytest.skip(str(error))
