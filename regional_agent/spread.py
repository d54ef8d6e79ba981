"""Admission over the cells of a Cluster: each request is decided by the cell that its policies lie in."""

from collections.abc import Sequence

from regional_agent.admission import Admission, Asked, OnVerdict, verdict_on
from regional_agent.answers import Check, Hold, Verdict
from regional_agent.blocks import Blocks
from regional_agent.domain.cells import cell_of, home_of
from regional_agent.policies import Policies


class SeveralCells(Exception):
    """What is asked cannot be told to several cells at once."""

    def __init__(self) -> None:
        super().__init__(
            "the policies of this request lie in several cells of the region's Cluster, which is not served"
        )


class SpreadAdmission:
    def __init__(self, cells: Sequence[Admission]) -> None:
        self._cells = cells

    @property
    def policies(self) -> Policies | None:
        return self._cells[0].policies

    @property
    def blocks(self) -> Blocks | None:
        return self._cells[0].blocks

    def asked(self, check: Check) -> Asked:
        return self._cells[0].asked(check)

    async def decide(self, check: Check) -> Verdict:
        return await verdict_on(self, self.asked(check))

    async def hold(self, hold: Hold) -> Verdict:
        return await verdict_on(self, self._cells[0].asked_to_hold(hold))

    def submit(self, asked: Asked, on_verdict: OnVerdict) -> None:
        places = _places(asked)
        if len(places) > 1:
            on_verdict(SeveralCells())
        else:
            self._cells[places.pop() if places else 0].submit(asked, on_verdict)


def _places(asked: Asked) -> set[int]:
    """The cells of its policies; of an operation also that in which it is known."""
    places = {cell_of(each.charge.quota) for each in asked.demanded}
    if asked.request.operation is not None:
        places.add(home_of(asked.subject.get("tenant", "")))
    return places
