"""An agent within a service's own process: the same decisions, and no hop.

    engine = Engine()                      # settings from LEASEHOLD_AGENT_…, as `leasehold agent` reads them
    async with engine.running():
        decision = await engine.check({"tenant": "acme", "route": "/v1/search"})

It is one agent more of the region: it shares the store with the others, reports what it admits, and says its last words
when the block ends.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property

import msgspec

from doors.problems import problem_document
from doors.settings import load_settings
from leasehold.asking import Decision, Mode, Refused, Subject, decision_of
from protocol.clock import SystemClock
from regional_agent.admission import Asked, verdict_on
from regional_agent.answers import Check, CheckAnswer, headers_of, retry_after_header
from regional_agent.asked_before import AskedBefore
from regional_agent.refusals import REFUSALS, problem_of
from regional_agent.region import Region
from regional_agent.settings import AgentSettings

PATIENCE_S = 5  # of a service that starts, with a coordinator and a store that may not be there
LOOK_AGAIN_S = 0.01


class Engine:
    def __init__(self, settings: AgentSettings | None = None) -> None:
        self.region = Region(settings or load_settings(AgentSettings), SystemClock())
        self._asked_before: AskedBefore[tuple[object, ...]] = AskedBefore(self.region.admission)

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
        try:
            asked = self._asked(subject, cost, operation_id, mode)
            answer, windows_s, _ = await verdict_on(self.region.admission, asked)
        except REFUSALS as error:
            problem = problem_of(error)
            raise Refused(problem.status, problem_document(problem, "", "")) from None
        return decision_of(answer, _Headers(answer, windows_s))

    def _asked(self, subject: Subject, cost: int | None, operation_id: str | None, mode: Mode) -> Asked:
        question = (*subject.items(), cost, type(cost), operation_id, mode)
        try:
            asked = self._asked_before.find(question)
        except TypeError:  # something in it is no text: it is refused by name below
            asked = None
        if asked is None:
            asked = self.region.admission.asked(_check(subject, cost, operation_id, mode))
            self._asked_before.keep(question, asked)
        return asked


class _Headers(Mapping[str, str]):
    """Put into words when somebody looks: most who ask want to know one thing only."""

    def __init__(self, answer: CheckAnswer, windows_s: Sequence[int]) -> None:
        self._answer = answer
        self._windows_s = windows_s

    @cached_property
    def _told(self) -> Mapping[str, str]:
        headers = headers_of(self._answer.policies, self._windows_s)
        if not self._answer.allowed:
            headers |= retry_after_header(self._answer.retry_after_ms, random.random())  # noqa: S311 - it spreads a herd
        return {name.lower(): value for name, value in headers.items()}

    def __getitem__(self, name: str) -> str:
        return self._told[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._told)

    def __len__(self) -> int:
        return len(self._told)

    def __repr__(self) -> str:
        return repr(self._told)


def _check(subject: Subject, cost: int | None, operation_id: str | None, mode: Mode) -> Check:
    asked = {"subject": dict(subject), "cost": cost, "operation_id": operation_id, "mode": mode}
    try:
        return msgspec.convert(asked, Check)
    except msgspec.ValidationError as error:
        raise Refused(422, {"title": "Invalid request", "detail": str(error)}) from None
