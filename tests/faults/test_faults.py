"""Agent, coordinator, checks and logs report each fault.

With LEASEHOLD_FAULTS=all those that take longer are made as well.
"""

from collections.abc import Iterator

import pytest

from tests.budget import size
from tests.faults.scene import Scene
from tests.faults.table import FAULTS, Fault
from tests.faults.trial import run

pytestmark = pytest.mark.xdist_group("faults")  # they share a stack
IS_WHOLE = size("LEASEHOLD_FAULTS", "quick") == "all"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene.prepare(tmp_path_factory.mktemp("faults"))
    try:
        scene.begin()
        yield scene
    finally:
        scene.end()


@pytest.mark.extended
@pytest.mark.parametrize("fault", [pytest.param(each, id=each.name) for each in FAULTS if IS_WHOLE or each.is_quick])
def test_a_fault_is_reported_by_name_until_it_is_healed(scene: Scene, fault: Fault) -> None:
    [record] = run(scene, [fault])
    assert record.mismatches() == []
