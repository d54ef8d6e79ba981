"""The task runner makes its own decisions correctly, and even Pythons that are too old can parse it."""

import ast
import os
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from tools.run_tests import Outcomes

DEV = Path(__file__).parents[2] / "dev"


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the runner of another checkout, in which nothing has been made yet."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    copy = shutil.copy(DEV, tmp_path)
    (tmp_path / "requirements.lock").write_text("a==1\n")
    (tmp_path / "pyproject.toml").write_text("[build-system]\n[project]\nname = 'a'\n[tool.hatch]\n[tool.ruff]\n")
    spec = spec_from_loader("dev", SourceFileLoader("dev", str(copy)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, DEV, *arguments], capture_output=True, text=True, check=False)


def test_help_is_the_default() -> None:
    answer = run()
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == run("help").stdout
    for command in ("up", "test", "check", "bench", "simulate", "help"):
        assert f"\n  {command} " in answer.stdout


def test_an_unknown_command_is_refused_with_the_help() -> None:
    answer = run("tset")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "'tset'" in answer.stderr
    assert "usage:" in answer.stderr


def test_an_unknown_step_of_check_is_refused_by_name() -> None:
    answer = run("check", "rufff")
    assert answer.returncode == 1
    assert "'rufff'" in answer.stderr


def test_old_pythons_can_read_it() -> None:
    ast.parse(DEV.read_text(), feature_version=(3, 7))  # ast knows no older one; 3.6 was tried by hand


def test_the_version_is_judged_before_anything_new_is_used() -> None:
    top = [ast.unparse(node) for node in ast.parse(DEV.read_text()).body]
    judged = next(number for number, text in enumerate(top) if text.startswith("if sys.version_info < OLDEST_PYTHON"))
    assert judged < top.index("import tomllib")
    assert not [text for text in top[:judged] if text.startswith(("def ", "class "))]


def test_venv_is_stale_until_its_stamp_says_otherwise(dev: ModuleType) -> None:
    assert dev.is_stale()
    Path(dev.PYTHON).parent.mkdir(parents=True)
    Path(dev.PYTHON).symlink_to(sys.executable)
    Path(dev.STAMP).write_text("\n".join(dev.stamp()))
    assert not dev.is_stale()
    Path(dev.PYTHON).unlink()
    Path(dev.PYTHON).symlink_to("/nowhere/python")
    assert dev.is_stale()


@pytest.mark.parametrize(
    ("file", "text", "changed"),
    [
        ("requirements.lock", "a==2\n", [True, False]),
        ("pyproject.toml", "[build-system]\n[project]\nname = 'b'\n[tool.hatch]\n", [False, True]),
        ("pyproject.toml", "[build-system]\n[project]\nname = 'a'\n[tool.hatch]\n[tool.mypy]\n", [False, False]),
    ],
)
def test_what_makes_it_stale(dev: ModuleType, file: str, text: str, changed: list[bool]) -> None:
    before = dev.stamp()
    Path(dev.ROOT, file).write_text(text)
    assert [old != new for old, new in zip(before, dev.stamp(), strict=True)] == changed


def test_another_place_makes_it_stale(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dev.stamp()
    monkeypatch.setattr(dev, "ROOT", f"{dev.ROOT}/.")
    assert dev.stamp()[0] != before[0]


def test_no_room_names_the_place_and_the_need(dev: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(dev.Trouble, match=f"no room in {tmp_path}: {1 << 40} MiB are needed for this"):
        dev.require_room(str(tmp_path), 1 << 40, "for this")


@pytest.mark.parametrize(
    ("output", "word"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "no room"),
        ("Retrying (Retry(total=4)) after connection broken by 'NewConnectionError('", "network"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "hash"),
        ("something else\nthe last line", "the last line"),
    ],
)
def test_trouble_is_explained(dev: ModuleType, output: str, word: str) -> None:
    assert word in dev.diagnosis(output)


# --- tests that fail in parallel --------------------------------------------------------------------------------------

FAILS_ONCE = """
import pytest

@pytest.mark.xdist_group("a group's name is no part of the test's")
def test_fails_once():
    marker = {marker!r}
    try:
        open(marker).close()
    except FileNotFoundError:
        open(marker, "w").close()
        raise AssertionError("the machine was busy")


def test_passes(): pass
"""
FAILS = "\n\ndef test_fails(): raise AssertionError\n"
PASSED_ALONE = "failed in parallel, passed alone:\n  test_it.py::test_fails_once\n"


def run_tests(directory: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "pytest.ini").write_text("[pytest]\naddopts = -q -n 1 --dist loadgroup\n")
    (directory / "test_it.py").write_text(source.format(marker=str(directory / "marker")))
    command = [sys.executable, "-m", "tools.run_tests", "-p", "no:schemathesis", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(DEV.parent)}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


IN_A_GROUP = """
import os, pytest

@pytest.mark.xdist_group("g")
@pytest.mark.parametrize("number", range(8))
def test_it(number):
    with open({marker!r}, "a") as workers:
        workers.write(os.environ["PYTEST_XDIST_WORKER"] + " ")
"""


@pytest.mark.extended
def test_the_tests_of_a_group_run_on_one_worker(tmp_path: Path) -> None:
    """They share a stack, which is costly to start."""
    done = run_tests(tmp_path, IN_A_GROUP, "-n2")
    assert done.returncode == 0, done.stdout
    workers = (tmp_path / "marker").read_text().split()
    assert (len(workers), len(set(workers))) == (8, 1)


def test_a_test_that_passes_alone_is_a_warning(tmp_path: Path) -> None:
    done = run_tests(tmp_path, FAILS_ONCE)
    assert done.returncode == 0, done.stdout
    assert PASSED_ALONE in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 passed in ")


def test_a_test_that_fails_alone_is_a_failure(tmp_path: Path) -> None:
    done = run_tests(tmp_path, FAILS_ONCE + FAILS)
    assert done.returncode == 1
    assert PASSED_ALONE in done.stdout
    assert "failed in parallel, and failed alone:\n  test_it.py::test_fails\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 failed, 2 passed in ")


@pytest.mark.extended
@pytest.mark.parametrize("argument", ["--no-rerun", "-n0"])
def test_nothing_runs_again_that_was_not_to_or_ran_alone(tmp_path: Path, argument: str) -> None:
    done = run_tests(tmp_path, FAILS_ONCE, argument)
    assert done.returncode == 1
    assert "running again" not in done.stdout


@pytest.mark.parametrize(
    ("differences", "is_worth_it"),
    [
        ({}, True),
        ({"failed": []}, False),
        ({"failed": [f"test_it.py::test_{number}" for number in range(6)]}, False),
        ({"failed": ["test_it.py"]}, False),  # it cannot be imported
        ({"is_complete": False}, False),  # Ctrl-C, or -x
        ({"is_parallel": False}, False),
    ],
)
def test_only_a_few_failures_of_a_whole_parallel_run_run_again(
    differences: dict[str, object], is_worth_it: bool
) -> None:
    outcomes = Outcomes()
    outcomes.failed, outcomes.is_complete, outcomes.is_parallel = ["test_it.py::test_it"], True, True
    vars(outcomes).update(differences)
    assert outcomes.are_worth_another_run() is is_worth_it
