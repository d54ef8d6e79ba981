"""Change the Lua that is shipped, for the stores of one run: how mutants remove a guard of a script."""

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

from regional_agent.store.sources import LUA, Library, read_file, read_library
from tests.simulation.world import World

Edit = tuple[str, str, str]  # a file of lua/ without its ending, the text to replace, and what takes its place


@contextlib.contextmanager
def edit_lua(world: World, *edits: Edit) -> Iterator[None]:
    """Replace texts of scripts and parts in all stores of a world. Each text must occur exactly once in its file."""
    library = _edited(edits)
    with contextlib.ExitStack() as stack:
        for machine in world.machines.values():
            stack.enter_context(patch.object(machine.store, "library", library))
        yield


@cache
def _edited(edits: tuple[Edit, ...]) -> Library:
    def read(path: Path) -> str:
        text, name = read_file(path), path.relative_to(LUA).with_suffix("").as_posix()
        for file, old, new in edits:
            if file == name:
                assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {file}.lua"
                text = text.replace(old, new)
        return text

    missing = [file for file, *_ in edits if not (LUA / f"{file}.lua").exists()]
    assert not missing, f"lua/ has no {missing}"
    return read_library(LUA, read)
