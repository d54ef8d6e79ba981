"""Every command has --json, its examples are right, and tables never break a word."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from leasehold.cli.app import app
from leasehold.cli.output import print_table

# They run until they are stopped, print lines for a shell, or report by their exit status.
WITHOUT_DATA = {"coordinator", "agent", "migrate", "env"}
ROOT = Path(__file__).parents[3]


def commands(group: TyperGroup, *above: str) -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, *above, name)
        else:
            assert isinstance(command, TyperCommand)
            yield " ".join((*above, name)), command


def the_app() -> TyperGroup:
    found = typer.main.get_command(app)
    assert isinstance(found, TyperGroup)
    return found


COMMANDS = dict(commands(the_app()))
EXAMPLES = [
    example.strip()
    for command in COMMANDS.values()
    for example in re.findall(r"^ *(?:Example: )?(leasehold .+)$", command.help or "", re.MULTILINE)
]


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - WITHOUT_DATA))
def test_a_command_that_prints_data_prints_json(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert "--json" in options or "--csv" in options, name
    assert "--json" in options, name


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_of_a_help_text_is_accepted(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("LEASEHOLD_")]:
        monkeypatch.delenv(name)
    words = shlex.split(example)[1:]
    name = next(" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in COMMANDS)
    COMMANDS[name].make_context(name, words[len(name.split()) :])  # a wrong option or argument raises


def test_the_commands_of_operations_have_examples() -> None:
    named = {" ".join(shlex.split(example)[1:3]) for example in EXAMPLES}
    assert {"lane list", "lane rebase", "lane approve", "region show", "rebalance move", "suspense resolve"} <= named
    assert len(EXAMPLES) >= 12


@pytest.mark.parametrize("columns", ["20", "60", "200"])
def test_a_word_such_as_an_id_is_never_broken(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    token, scope = "3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10", "region:ap-south"
    print_table(["id", "scopes", "note"], [[token, f"{scope} usage:read", "the agent of a region far away"]])
    printed = capsys.readouterr().out
    assert token in printed
    assert scope in printed
