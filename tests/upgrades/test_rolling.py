"""A stack is rolled to this release and back under load, and each pair of releases is tried meanwhile.

`./dev upgrades --rounds 10` rolls it again and again, and so does LEASEHOLD_UPGRADE_ROUNDS=10 here.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.compatibility.releases import GUIDE, OLDEST_PEER, minor_of
from tests.budget import size
from tests.chaos.balance import sheet
from tests.parts import part
from tests.upgrades.mixed_stack import MixedStack
from tests.upgrades.pairs import PAIRS, Pair, table
from tests.upgrades.rolling import Rolled, roll
from tools.parts import TABLE, EarlierRelease

ROOT = Path(__file__).parents[2]
ROUNDS = size("LEASEHOLD_UPGRADE_ROUNDS", 1)
pytestmark = pytest.mark.xdist_group("upgrades")  # they share what was rolled


@pytest.fixture(scope="module")
def rolled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolled]:
    before = part("release-before") / "venv" / "bin" / "python"
    stack = MixedStack(tmp_path_factory.mktemp("mixed"), before)
    try:
        stack.begin()
        yield roll(stack, ROUNDS)
    finally:
        stack.end()


@pytest.mark.extended
def test_no_request_fails_and_each_unit_is_booked_once(rolled: Rolled) -> None:
    print(sheet(rolled.lines, rolled.journal, rolled.done))
    assert rolled.faults() == []
    assert all(line.admitted for line in rolled.lines)


@pytest.mark.extended
@pytest.mark.parametrize("pair", [pytest.param(each, id=each.name) for each in PAIRS])
def test_each_pair_of_releases_works(rolled: Rolled, pair: Pair) -> None:
    assert rolled.tried[pair.name]
    assert set(rolled.tried[pair.name].values()) == {""}, rolled.tried[pair.name]


@pytest.mark.extended
def test_wrong_orders_are_refused_with_a_sentence_that_names_the_guide(rolled: Rolled) -> None:
    expected = {"schema_ahead"} | ({"schema_behind", "migrate"} if rolled.has_new_schema else set())
    assert set(rolled.refused) == expected
    assert all(GUIDE in " ".join(sentence.split()) for sentence in rolled.refused.values()), rolled.refused


def test_the_guide_has_the_pairs() -> None:
    assert table() in (ROOT / GUIDE).read_text(encoding="utf-8")


def test_the_recorded_release_is_the_one_before() -> None:
    """The table names the minor release before, and the commit of its tag if the tag exists."""
    known = TABLE["release-before"]
    assert isinstance(known, EarlierRelease)
    assert minor_of(known.release) == minor_of(OLDEST_PEER)
    assert f"## [{known.release}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    git = ["git", "-C", str(ROOT), "rev-list", "-n", "1", f"v{known.release}"]
    tagged = subprocess.run(git, capture_output=True, text=True, check=False)
    if tagged.returncode == 0:
        assert tagged.stdout.strip() == known.commit
