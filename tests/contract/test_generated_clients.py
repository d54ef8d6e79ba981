"""The generated calls of the Go and TypeScript clients are those of docs/openapi/agent.json."""

from pathlib import Path

import pytest

from tests.parts import toolchain
from tools.clients import GENERATED, generated

PROGRAMS = {".go": "go", ".ts": "node"}


@pytest.mark.extended
@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_the_generated_calls_are_up_to_date(path: Path) -> None:
    toolchain(PROGRAMS[path.suffix])
    assert path.read_text(encoding="utf-8") == generated(path), "run ./dev clients"
