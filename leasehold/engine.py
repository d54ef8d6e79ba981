"""An agent inside a service's own process: the same decisions without a network hop.

    engine = Engine()                      # settings from LEASEHOLD_AGENT_…, as `leasehold agent` reads them
    async with engine.running():
        decision = await engine.check({"tenant": "acme", "route": "/v1/search"})

It is one more agent of its region: it shares the store with the others and reports what it admits. When the block ends
it sends a last exchange with the rest.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from leasehold.client._async.limiter import DEFAULT_TTL_MS, AsyncLimiter
from leasehold.client.agent_protocol import (
    AgentUnavailable,
    Costs,
    Decision,
    Denied,
    Explanation,
    HeldUnits,
    RequestRejected,
    Subject,
    decision_of,
    results_of,
)
from protocol.check import MAX_BATCH, BatchAnswer, Check, Hold, HoldCommit, HoldExtension, HoldStatus, Mode
from protocol.clock import SystemClock
from regional_agent.admission.answers import Verdict
from regional_agent.admission.check_cache import CheckCache
from regional_agent.admission.engine import await_verdict, resolve
from regional_agent.admission.plan import CheckPlan
from regional_agent.agent import RegionalAgent
from regional_agent.http.batch import PendingBatch
from regional_agent.http.refusals import REFUSALS, problem_of
from regional_agent.http.schemas import headers_of, retry_after_header
from regional_agent.settings import AgentSettings
from web.problems import Problem, problem_document
from web.settings import load_settings

START_TIMEOUT_S = 5  # the coordinator or the store may be down
POLL_S = 0.01

T = TypeVar("T")


class Engine(AsyncLimiter):
    """An agent without HTTP, with the methods of `AsyncClient`.

    Without `settings` it reads them from the environment (LEASEHOLD_AGENT_…), as `leasehold agent` does.
    """

    def __init__(self, settings: AgentSettings | None = None) -> None:
        self.region = RegionalAgent(settings or load_settings(AgentSettings), SystemClock())
        self._plans: CheckCache[tuple[object, ...], CheckPlan] = CheckCache(self.region.admission)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine. The block begins when the engine can decide, or after a time-out."""
        async with self.region.running():
            with suppress(TimeoutError):
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._ready()
            yield

    async def _ready(self) -> None:
        while not self.region.has_epochs or self.region.admission.policies is None:  # noqa: ASYNC110 - two components say so
            await asyncio.sleep(POLL_S)

    async def check(
        self,
        subject: Subject,
        *,
        cost: int | None = None,
        costs: Costs | None = None,
        operation_id: str | None = None,
        mode: Mode = "enforce",
    ) -> Decision:
        """Decide whether a request may happen now. Raise RequestRejected for one that an agent would reject."""
        admission = self.region.admission
        try:
            plan = self._plan(subject, cost, costs, operation_id, mode)
            verdict = admission.decide_locally(plan)  # nearly always, for a hot key
            if not isinstance(verdict, Verdict):
                verdict = await await_verdict(admission, plan, verdict)
        except REFUSALS as error:
            raise _rejection(problem_of(error)) from None
        return _decision(verdict)

    async def check_batch(self, checks: Sequence[Mapping[str, Any]]) -> list[Decision | RequestRejected]:
        """Decide up to 1,000 checks in order, each as it would be in a call of its own.

        If one check is rejected, its place in the result has the `RequestRejected`, which is not raised.
        """
        if not 1 <= len(checks) <= MAX_BATCH:
            detail = f"checks: there are {len(checks)}, and must be 1 to {MAX_BATCH}"
            raise RequestRejected(422, {"title": "Invalid request", "detail": detail})
        answer: asyncio.Future[BatchAnswer] = asyncio.get_running_loop().create_future()
        PendingBatch(self.region.admission, self._plan_item, partial(resolve, answer)).submit(checks)
        return results_of(await answer)

    async def explain(self, subject: Subject, *, cost: int | None = None, costs: Costs | None = None) -> Explanation:
        """Tell for every policy whether it matches a request and, if not, why. Nothing is consumed."""
        try:
            return await self.region.explain(_check(subject, cost, costs, None, "peek"))
        except REFUSALS as refusal:
            raise _rejection(problem_of(refusal)) from None

    def _plan_item(self, check: Mapping[str, Any]) -> CheckPlan:
        """Plan one check of a batch, or raise why it is refused."""
        try:
            return self.region.admission.plan_check(msgspec.convert(check, Check))
        except msgspec.ValidationError as error:
            raise Problem("invalid-request", str(error)) from None

    # --- holds -------------------------------------------------------------------------------------------------------

    async def hold(
        self,
        subject: Subject,
        *,
        units: int | None = None,
        costs: Costs | None = None,
        ttl_ms: int = DEFAULT_TTL_MS,
        operation_id: str,
    ) -> HeldUnits:
        """Reserve units for work whose cost is not known yet. Raise Denied if there are not enough."""
        body: dict[str, object] = {"subject": dict(subject), "units": units, "costs": costs, "ttl_ms": ttl_ms}
        body["operation_id"] = operation_id
        try:
            self.region.holds.require_key()
            verdict = await self.region.admission.hold(_decode(body, Hold))
        except Problem as problem:
            raise _rejection(problem) from None
        except REFUSALS as error:
            raise _rejection(problem_of(error)) from None
        if not verdict.answer.allowed:
            raise Denied(_decision(verdict))
        held = verdict.held(ttl_ms)
        return HeldUnits(self.region.holds.seal.seal(held.id), units or 0, held.ttl_ms)

    async def commit(self, hold: HeldUnits, units: int | None = None, *, costs: Costs | None = None) -> None:
        """Consume units of a hold and release the rest. Repeating it changes nothing; another number is rejected."""
        commit, holds = _decode({"units": units, "costs": costs}, HoldCommit), self.region.holds
        await self._change(hold, lambda hold_id: holds.commit(hold_id, commit))

    async def extend(self, hold: HeldUnits, ttl_ms: int) -> None:
        """Let a hold last at least `ttl_ms` from now on; a slot lasts at most as long as its quota says."""
        extended_ms, holds = _decode({"ttl_ms": ttl_ms}, HoldExtension).ttl_ms, self.region.holds
        await self._change(hold, lambda hold_id: holds.update(hold_id, "extend", extended_ms))

    async def release(self, hold: HeldUnits) -> None:
        """Give all units of a hold back."""
        await self._change(hold, lambda hold_id: self.region.holds.update(hold_id, "release"))

    async def _change(self, hold: HeldUnits, action: Callable[[str], Awaitable[HoldStatus]]) -> None:
        """Change a hold, or raise: a commit that is lost is not billed."""
        if hold.hold_id is None:
            return
        try:
            await action(hold.hold_id)
        except Problem as problem:
            if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise AgentUnavailable(problem.detail) from None
            raise _rejection(problem) from None

    def _plan(
        self, subject: Subject, cost: int | None, costs: Costs | None, operation_id: str | None, mode: Mode
    ) -> CheckPlan:
        if costs is not None:  # they differ from request to request
            return self.region.admission.plan_check(_check(subject, cost, costs, operation_id, mode))
        key = (*_items(subject), cost, type(cost), operation_id, mode)
        try:
            plan = self._plans.find(key)
        except TypeError:  # a value is not text: `_check` rejects it by its name
            plan = None
        if plan is None:
            plan = self.region.admission.plan_check(_check(subject, cost, costs, operation_id, mode))
            self._plans.keep(key, plan)
        return plan


class _Headers(Mapping[str, str]):
    """The RateLimit headers, made when they are read first: most callers read `allowed` only."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict

    @cached_property
    def _headers(self) -> Mapping[str, str]:
        answer = self._verdict.answer
        headers = headers_of(self._verdict)
        if not answer.allowed:
            headers |= retry_after_header(answer.retry_after_ms, random.random())  # noqa: S311 - spreads retries
        return {name.lower(): value for name, value in headers.items()}

    def __getitem__(self, name: str) -> str:
        return self._headers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def __repr__(self) -> str:
        return repr(self._headers)


def _items(subject: Subject) -> Iterable[object]:
    """Return the fields of a subject as values that can be a key of a dict."""
    labels = subject.get("labels")
    if not isinstance(labels, Mapping):
        return subject.items()
    return (*((name, value) for name, value in subject.items() if name != "labels"), tuple(labels.items()))


def _decision(verdict: Verdict) -> Decision:
    return decision_of(verdict.answer, _Headers(verdict))


def _rejection(problem: Problem) -> RequestRejected:
    return RequestRejected(problem.status, problem_document(problem, "", ""))


def _check(subject: Subject, cost: int | None, costs: Costs | None, operation_id: str | None, mode: Mode) -> Check:
    body = {"subject": dict(subject), "cost": cost, "costs": costs, "operation_id": operation_id, "mode": mode}
    return _decode(body, Check)


def _decode(body: Mapping[str, object], shape: type[T]) -> T:
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        raise RequestRejected(422, {"title": "Invalid request", "detail": str(error)}) from None
