"""Parts that tests fetch: what cannot be fetched is said, and never left out in CI."""

from pathlib import Path

import pytest

from tests import parts
from tools.parts import CannotFetch, main


def cannot_fetch(name: str) -> Path:
    raise CannotFetch(f"{name} cannot be had here")


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_part_fails_in_ci_and_is_skipped_with_its_reason_elsewhere(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(parts, "fetch", cannot_fetch)
    with pytest.raises(outcome, match="redis cannot be had here"):
        parts.part("redis")


def test_an_unknown_part_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "redis" in capsys.readouterr().out
