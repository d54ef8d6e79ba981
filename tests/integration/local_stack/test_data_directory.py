"""`leasehold up` keeps its data directory private, and leaves foreign ones unchanged."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from leasehold.local_stack.children import end_left_running
from leasehold.local_stack.data_directory import CannotStart, DataDirectory, open_data_directory, write_private
from leasehold.local_stack.processes import Identity, identity, spawn, stop


@contextmanager
def opened(path: Path) -> Iterator[DataDirectory]:
    directory = open_data_directory(path)
    try:
        yield directory
    finally:
        directory.release()


def test_secrets_are_made_once_and_private(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as directory:
        directory.prepare()
        first = directory.secrets()
    with opened(tmp_path / "data") as directory:
        directory.prepare()
        assert directory.secrets() == first
    assert (tmp_path / "data" / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert len({first.postgres, *first.stores.values(), *first.tokens.values()}) == 4 + len(first.tokens)


def test_one_launcher_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(CannotStart, match=r"another `leasehold up` \(pid \d+\) is running"):
        open_data_directory(tmp_path)
    with opened(tmp_path):
        pass


def test_a_foreign_directory_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CannotStart, match="not a data directory of Leasehold"):
        open_data_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_data_of_another_version_are_refused_without_fresh(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.prepare()
    (tmp_path / "format").write_text("leasehold local stack, format 99\n")
    with opened(tmp_path) as directory:
        with pytest.raises(CannotStart, match="another version of Leasehold"):
            directory.prepare()
        directory.empty()
        directory.prepare()
        assert directory.secrets()


def test_missing_passwords_are_reported(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.prepare()
        directory.postgres.mkdir()
        with pytest.raises(CannotStart, match="--fresh"):
            directory.secrets()


@pytest.mark.parametrize("place", ["a-file", "a-file/below"])
def test_an_unusable_path_is_reported(place: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(CannotStart, match=r"cannot use .*: choose another directory with --data"):
        open_data_directory(tmp_path / place)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file.json"
    write_private(target, {"is": "whole"})
    (tmp_path / "file.json.new").write_text('{"half')
    write_private(target, {"is": "newer"})
    assert json.loads(target.read_text()) == {"is": "newer"}


@pytest.mark.parametrize("nonsense", ["", "{", "[1]", '{"postgres": 1}', '{"postgres": [1]}'])
def test_an_unreadable_record_of_processes_is_ignored(nonsense: str, tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.prepare()
        (tmp_path / "running.json").write_text(nonsense)
        assert end_left_running(directory) == []


def test_the_lock_of_a_killed_postgres_is_removed(tmp_path: Path) -> None:
    """Another process may have its pid by now, and Postgres would refuse to start."""
    with opened(tmp_path) as directory:
        directory.prepare()
        directory.postgres.mkdir()
        lock = directory.postgres / "postmaster.pid"
        process = spawn([sys.executable, "-c", "import time; time.sleep(600)"])
        try:
            lock.write_text(f"{process.pid}\n/data\n")
            directory.record_running({"postgres": Identity(process.pid, "before the machine was started again")})
            assert end_left_running(directory) == []
            assert not lock.exists()
            assert process.poll() is None
        finally:
            stop(process, by=signal.SIGKILL)


def test_processes_that_were_left_running_are_stopped_and_named(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.prepare()
        process = spawn([sys.executable, "-c", "import time; time.sleep(600)"])
        who = identity(process.pid)
        assert who
        directory.record_running({"agent-us-east": who})
        assert end_left_running(directory) == ["agent-us-east"]
        assert process.wait() == -signal.SIGTERM
        assert directory.left_running() == {}
