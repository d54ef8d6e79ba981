"""A script and the parts that it requires are joined into one text."""

import re

import pytest

from regional_agent.store.sources import LUA, sources


def test_every_script_is_complete() -> None:
    joined = sources()
    assert set(joined) == {path.stem for path in LUA.glob("*.lua")}
    assert not [name for name, source in joined.items() if b"require(" in source]


@pytest.mark.parametrize("path", [*LUA.glob("parts/*.lua"), *LUA.glob("algorithms/*.lua")], ids=lambda path: path.stem)
def test_every_part_defines_something_and_is_required(path: object) -> None:
    assert hasattr(path, "read_text")
    assert re.search(r"^return ", path.read_text(), re.MULTILINE)
    assert any(path.read_text().encode().splitlines()[0] in source for source in sources().values())
