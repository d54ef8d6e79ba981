"""An agent within a service's own process: the same decisions, and no hop.

    engine = Engine()                      # settings from LEASEHOLD_AGENT_…, as `leasehold agent` reads them
    async with engine.running():
        decision = await engine.check({"tenant": "acme", "route": "/v1/search"})

It is one agent more of the region: it shares the store with the others, reports what it admits, and says its last words
when the block ends.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from doors.problems import problem_document
from doors.settings import load_settings
from leasehold.asking import Decision, Mode, Refused, Subject, decision_of
from protocol.clock import SystemClock
from regional_agent.answers import Check, headers_of, retry_after_header
from regional_agent.refusals import REFUSALS, problem_of
from regional_agent.region import Region
from regional_agent.settings import AgentSettings

PATIENCE_S = 5  # of a service that starts, with a coordinator and a store that may not be there
LOOK_AGAIN_S = 0.01


class Engine:
    def __init__(self, settings: AgentSettings | None = None) -> None:
        self.region = Region(settings or load_settings(AgentSettings), SystemClock())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Begins when the engine can decide, or after a while in which it could not: then each question says why."""
        async with self.region.running():
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._ready()
            yield

    async def _ready(self) -> None:
        while not self.region.has_epochs or self.region.admission.policies is None:  # noqa: ASYNC110 - two rooms tell
            await asyncio.sleep(LOOK_AGAIN_S)

    async def check(
        self, subject: Subject, *, cost: int | None = None, operation_id: str | None = None, mode: Mode = "enforce"
    ) -> Decision:
        """May this happen now? Raises Refused for a question that an agent would refuse."""
        check = _check(subject, cost, operation_id, mode)
        try:
            answer, windows_s, _ = await self.region.admission.decide(check)
        except REFUSALS as error:
            problem = problem_of(error)
            raise Refused(problem.status, problem_document(problem, "", "")) from None
        headers = {name.lower(): value for name, value in headers_of(answer.policies, windows_s).items()}
        if not answer.allowed:
            chance = random.random()  # noqa: S311 - it spreads a herd
            headers["retry-after"] = retry_after_header(answer.retry_after_ms, chance)["Retry-After"]
        return decision_of(answer, headers)


def _check(subject: Subject, cost: int | None, operation_id: str | None, mode: Mode) -> Check:
    asked = {"subject": dict(subject), "cost": cost, "operation_id": operation_id, "mode": mode}
    try:
        return msgspec.convert(asked, Check)
    except msgspec.ValidationError as error:
        raise Refused(422, {"title": "Invalid request", "detail": str(error)}) from None
