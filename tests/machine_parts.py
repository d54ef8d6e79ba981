"""Programs of the machine that some tests need: without one a test is skipped, and in CI it fails."""

import os
import shutil
from pathlib import Path

import pytest


def program(*names: str) -> Path:
    """Return the first of these programs that the machine has."""
    for name in names:
        if found := shutil.which(name):
            return Path(found)
    reason = f"this machine has no {names[0]}: install Debian's package"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
