"""The screen of `leasehold up` shows what is in stack.json."""

import shlex
from pathlib import Path

import pytest

from leasehold.local_stack.screen import commands, show, without_password

STACK = {
    "coordinator": "http://127.0.0.1:8400",
    "agents": {"us-east": "http://127.0.0.1:8411"},
    "tokens": {"usage:read": "lh_usage", "admin": "lh_admin"},
    "postgres": "postgresql://leasehold:pa55word@127.0.0.1:8432/leasehold",
    "stores": {"us-east": "redis://:pa55word@127.0.0.1:8479/0"},
    "pids": {"launcher": 1},
}


def test_screen_has_everything_that_is_needed_and_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    show(STACK, Path("data"), 1.5)
    screen = capsys.readouterr().out
    for part in ("8400", "8411", "8432", "8479", "lh_usage", "lh_admin", "1.5 s"):
        assert part in screen
    assert "pa55word" not in screen


def test_commands_are_whole_lines_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    show(STACK, Path("data"), 1.5)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    shown = [command for _, command in commands(STACK)]
    assert len(shown) == 3
    assert all(command in lines and shlex.split(command)[0] == "curl" for command in shown)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:a@b:1/0", "redis://:…@b:1/0"),
        ("postgresql://u:a@b/u", "postgresql://u:…@b/u"),
        ("http://b:1", "http://b:1"),
    ],
)
def test_passwords_are_left_out(url: str, shown: str) -> None:
    assert without_password(url) == shown
