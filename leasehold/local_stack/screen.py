"""The screen of `leasehold up`: where everything is, the tokens, and three commands to try."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from leasehold.local_stack.plan import Stack


def show(stack: Stack, data: Path, seconds: float) -> None:
    """Print the screen, in colours on a terminal. Lines are never broken, because people copy them."""
    console = Console(highlight=False, soft_wrap=True)
    for style, line in _lines(stack, data, seconds):
        console.print(line, style=style, markup=False)


def _lines(stack: Stack, data: Path, seconds: float) -> Iterator[tuple[str, str]]:
    yield "bold green", f"Leasehold is up, after {seconds:.1f} s."
    yield "", ""
    for name, url in _addresses(stack):
        yield "", f"  {name:18}{without_password(url)}"
    yield "", f"  {'data, logs':18}{data}"
    yield "bold", "\nAddresses and tokens as variables, and `leasehold` on the PATH, for a shell in another terminal"
    yield "cyan", f"  {environment_command(data)}"
    yield "bold", "\nTokens, one for each scope (these and the passwords are in stack.json in that directory)"
    for scope, token in stack["tokens"].items():
        yield "", f"  {scope:18}{token}"
    for what, command in commands(stack):
        yield "bold", f"\n{what}"
        yield "cyan", f"  {command}"
    yield "dim", "\nCtrl-C stops everything; what the regions did not spend is returned first."


def environment_command(data: Path) -> str:
    """Return the command that sets a shell up for this stack, wherever the shell is."""
    command = shlex.join([str(Path(sys.executable).parent / "leasehold"), "env", "--data", str(data)])
    return f'eval "$({command})"'


def _addresses(stack: Stack) -> Iterator[tuple[str, str]]:
    yield "coordinator", stack["coordinator"]
    for region, url in stack["agents"].items():
        yield f"agent {region}", url
    for region, url in stack["stores"].items():
        yield f"store {region}", url
    yield "postgres", stack["postgres"]


def without_password(url: str) -> str:
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":…@", 1) if password else url


def commands(stack: Stack) -> Iterator[tuple[str, str]]:
    """Yield the commands to try first, each with its description and as one line for a shell."""
    agent = next(iter(stack["agents"].values()))
    yield "An export is admitted", _check(agent, cost=1)
    yield "More than is left of the month is denied", _check(agent, cost=1001)
    usage = f"{stack['coordinator']}/v1/usage?group_by=tenant,quota,region"
    yield (
        "What finance sees, a moment later",
        f"curl -s '{usage}' -H 'Authorization: Bearer {stack['tokens']['usage:read']}'",
    )


def _check(agent: str, cost: int) -> str:
    body = {"subject": {"tenant": "acme", "route": "/v1/exports", "method": "POST"}, "cost": cost}
    return f"curl -si {agent}/v1/check -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
