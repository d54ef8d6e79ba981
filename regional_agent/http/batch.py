"""A batch of up to 1,000 checks: submitted and decided in order, and answered together.

A batch is planned and submitted in parts, one in each turn of the event loop, so that other requests wait for one part
and not for the whole. A thousand checks of tenants that were never seen take some tens of milliseconds.

Equal checks in a row of a part are submitted once, as a run: their plan is cached, so they are the same object.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Generic, TypeVar

import msgspec
import structlog

from protocol.check import BatchAnswer, BatchItem, Check
from protocol.denials import status_of_answer
from protocol.problems import PROBLEMS
from protocol.traces.trace_context import TraceContext
from regional_agent.admission.answers import Verdict
from regional_agent.admission.engine import Admission
from regional_agent.admission.plan import CheckPlan
from regional_agent.http.callers import adjust_forbidden
from regional_agent.http.refusals import REFUSALS, problem_of
from web.bodies import decode
from web.problems import Problem, problem_document

log = structlog.get_logger()

CHECKS_A_TURN = 64  # of a batch in one turn of the event loop: as many as one call of the store decides

T = TypeVar("T")


def plan_or_refusal(admission: Admission, check: Check) -> CheckPlan | Exception:
    """Return the plan of a check, or why it is refused, which answers this one check of a batch."""
    try:
        return admission.plan_check(check)
    except REFUSALS as refusal:
        return refusal


def authorize(plan: CheckPlan | Exception, *, may_adjust: bool) -> CheckPlan | Exception:
    """Return the plan, or a refusal where it is an adjustment and the caller may not adjust."""
    if may_adjust or isinstance(plan, Exception) or plan.request.mode != "adjust":
        return plan
    return adjust_forbidden()


_decode_plain = msgspec.json.Decoder(Check).decode
_encode = msgspec.json.Encoder().encode


def decode_check(raw: bytes) -> Check:
    """Return a check as `decode` does, in a third of its time where the body is plain.

    A body without escapes has two quotes for each name and each text of its check. It has more of them if a name occurs
    twice, or if it has a field that its encoding leaves out: then `decode` looks closer.
    """
    if raw.isascii() and b"\\" not in raw:
        with suppress(msgspec.MsgspecError, RecursionError):
            check = _decode_plain(raw)
            if _encode(check).count(b'"') == raw.count(b'"'):
                return check
    return decode(raw, Check)


class BatchPlaces:
    """The caller of equal checks in a row: their verdicts may go to any of their places."""

    __slots__ = ("_batch", "_next")

    has_disconnected = False  # the answer to the other checks is worth as much
    trace_context: TraceContext | None = None

    def __init__(self, batch: "PendingBatch[Any]", first: int) -> None:
        self._batch = batch
        self._next = first

    def on_verdict(self, verdict: Verdict | Exception) -> None:
        place, self._next = self._next, self._next + 1
        self._batch.fill(place, verdict)


class PendingBatch(Generic[T]):
    def __init__(
        self,
        admission: Admission,
        plan: Callable[[T], CheckPlan | Exception],
        on_answer: Callable[[BatchAnswer], object],
        *,
        path: str = "",
        request_id: str = "",
    ) -> None:
        """`plan` returns the plan of one check, or why it is refused, or raises that. `on_answer` gets all answers."""
        self._admission = admission
        self._plan = plan
        self._on_answer = on_answer
        self._path = path
        self._request_id = request_id
        self._checks: Sequence[T] = ()
        self._items: list[BatchItem] = []
        self._left = 0

    def submit(self, checks: Sequence[T]) -> None:
        self._checks, self._left = checks, len(checks)
        self._items = [BatchItem(status=0)] * len(checks)
        self._submit_part(0)

    def _submit_part(self, begin: int) -> None:
        """Plan and submit the checks of this turn from the place `begin` on, and leave the rest to the next turns."""
        part = self._checks[begin : begin + CHECKS_A_TURN]
        end = begin + len(part)
        if end < len(self._checks):
            asyncio.get_running_loop().call_soon(self._submit_part, end)
        for _, equal in groupby(list(map(self._planned, part)), key=id):
            plan, *others = equal
            place, begin = begin, begin + 1 + len(others)
            if isinstance(plan, Exception):
                self.fill(place, plan)
            else:
                self._admission.submit(plan, BatchPlaces(self, place), begin - place)

    def _planned(self, check: T) -> CheckPlan | Exception:
        """Return the plan of a check, or why there is none, which answers this check and not the batch."""
        try:
            return self._plan(check)
        except Exception as error:
            return error

    def fill(self, place: int, outcome: Verdict | Exception) -> None:
        self._items[place] = self._item(outcome)
        self._left -= 1
        if not self._left:
            self._on_answer(BatchAnswer(items=self._items))

    def _item(self, outcome: Verdict | Exception) -> BatchItem:
        """Return the answer that the check would have got by itself."""
        if isinstance(outcome, Exception):
            problem = _problem_of(outcome)
            document = problem_document(problem, self._path, self._request_id)
            return BatchItem(status=problem.status, problem=document)
        return BatchItem(status=status_of_answer(outcome.answer), answer=outcome.answer)


def _problem_of(error: Exception) -> Problem:
    if isinstance(error, Problem):
        return error
    try:
        return problem_of(error)
    except Exception:
        log.exception("check of a batch failed")
        return Problem("internal-error", PROBLEMS["internal-error"].explanation)
