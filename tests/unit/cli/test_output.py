"""Tables in a pipe have no trailing blanks, and files are written whole or not at all."""

from pathlib import Path

import pytest
import typer

from leasehold.cli.output import print_table, written_whole


def test_a_long_cell_does_not_pad_the_other_lines_of_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(["id", "details"], [["1", "x" * 5000], ["2", "short"]])
    heading, _, last = capsys.readouterr().out.splitlines()
    assert heading.split() == ["id", "details"]
    assert len(heading) < 20
    assert last.endswith("short")


def test_a_file_in_no_directory_ends_the_command_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reached = []
    with pytest.raises(typer.Exit), written_whole(tmp_path / "none" / "a.csv"):
        reached.append(True)
    assert not reached
    assert "No such file or directory" in capsys.readouterr().err


def test_a_file_that_fails_halfway_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("before")
    with pytest.raises(RuntimeError), written_whole(file):
        raise RuntimeError
    assert (file.read_text(), list(tmp_path.iterdir())) == ("before", [file])
    with written_whole(file) as partial:
        partial.write_text("after")
    assert file.read_text() == "after"
