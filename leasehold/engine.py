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
from http import HTTPStatus
from typing import TypeVar

import msgspec

from leasehold.asking import AgentUnavailable, Decision, Denied, Held, Mode, Refused, Subject, decision_of
from leasehold.holding import AsyncGuarding
from protocol.check import Check, CheckAnswer, Hold, HoldCommit, HoldExtension
from protocol.clock import SystemClock
from regional_agent.admission.check_cache import AskedBefore
from regional_agent.admission.engine import Asked, asked_verdict
from regional_agent.agent import Region
from regional_agent.http.refusals import REFUSALS, problem_of
from regional_agent.http.schemas import Verdict, Window, headers_of, retry_after_header
from regional_agent.settings import AgentSettings
from web.problems import Problem, problem_document
from web.settings import load_settings

PATIENCE_S = 5  # of a service that starts, with a coordinator and a store that may not be there
LOOK_AGAIN_S = 0.01

T = TypeVar("T")


class Engine(AsyncGuarding):
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
        admission = self.region.admission
        try:
            asked = self._asked(subject, cost, operation_id, mode)
            verdict = admission.known(asked)  # of a hot key nearly always
            if not isinstance(verdict, Verdict):
                verdict = await asked_verdict(admission, asked, verdict)
        except REFUSALS as error:
            raise _refused(problem_of(error)) from None
        return _decision(verdict)

    # --- holds -------------------------------------------------------------------------------------------------------

    async def hold(self, subject: Subject, *, units: int, ttl_ms: int, operation_id: str) -> Held:
        """Set units aside for work whose cost is not known yet. Raises Denied where there are not as many."""
        asked = {"subject": dict(subject), "units": units, "ttl_ms": ttl_ms, "operation_id": operation_id}
        try:
            self.region.holds.require_key()
            verdict = await self.region.admission.hold(_read(asked, Hold))
        except Problem as problem:
            raise _refused(problem) from None
        except REFUSALS as error:
            raise _refused(problem_of(error)) from None
        if not verdict.answer.allowed:
            raise Denied(_decision(verdict))
        held = verdict.held(ttl_ms)
        return Held(self.region.holds.seal.seal(held.id), units, held.ttl_ms)

    async def commit(self, hold: Held, units: int) -> None:
        """So many were used. Repeating it changes nothing; another number is refused."""
        await self._tell(hold, "commit", _read({"units": units}, HoldCommit).units)

    async def extend(self, hold: Held, ttl_ms: int) -> None:
        await self._tell(hold, "extend", _read({"ttl_ms": ttl_ms}, HoldExtension).ttl_ms)

    async def release(self, hold: Held) -> None:
        await self._tell(hold, "release")

    async def _tell(self, hold: Held, action: str, amount: int = 0) -> None:
        """A failure is the caller's to know: a commit that nobody heard is not billed."""
        if hold.hold_id is None:
            return
        try:
            await self.region.holds.tell(hold.hold_id, action, amount)
        except Problem as problem:
            if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise AgentUnavailable(problem.detail) from None
            raise _refused(problem) from None

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

    def __init__(self, answer: CheckAnswer, windows: Sequence[Window]) -> None:
        self._answer = answer
        self._windows = windows

    @cached_property
    def _told(self) -> Mapping[str, str]:
        headers = headers_of(self._answer.policies, self._windows)
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


def _decision(verdict: Verdict) -> Decision:
    return decision_of(verdict.answer, _Headers(verdict.answer, verdict.windows))


def _refused(problem: Problem) -> Refused:
    return Refused(problem.status, problem_document(problem, "", ""))


def _check(subject: Subject, cost: int | None, operation_id: str | None, mode: Mode) -> Check:
    return _read({"subject": dict(subject), "cost": cost, "operation_id": operation_id, "mode": mode}, Check)


def _read(asked: Mapping[str, object], shape: type[T]) -> T:
    try:
        return msgspec.convert(asked, shape)
    except msgspec.ValidationError as error:
        raise Refused(422, {"title": "Invalid request", "detail": str(error)}) from None
