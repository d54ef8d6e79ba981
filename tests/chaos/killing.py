"""Kinds of kills; each ends processes abruptly and starts them again."""

import random
from collections.abc import Sequence

from tests.chaos.pieces import Stack

KINDS = (
    "agent-us-east",
    "agent-us-east-2",
    "agent-eu-west",
    "coordinator",
    "postgres",
    "store-us-east, everysec",
    "store-us-east, always",
    "store-eu-west, everysec",
    "store-eu-west, always",
    "everything",
)


def kill(stack: Stack, kind: str) -> str:
    """Kill, start again, and wait until all processes work. Return what happened, for the sheet."""
    name, _, fsync = kind.partition(", ")
    if fsync:
        stack.fsync(name.removeprefix("store-"), fsync)
    names = list(stack.pieces) if name == "everything" else [name]
    _kill_and_begin(stack, names)
    stack.wait()
    return f"killed {kind}"


def _kill_and_begin(stack: Stack, names: Sequence[str]) -> None:
    for name in random.sample(names, len(names)):
        stack.pieces[name].kill()
    for name in names:
        stack.pieces[name].begin()
