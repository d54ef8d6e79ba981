"""A batch of up to 1,000 checks: submitted and decided in order, and answered together.

Equal checks in a row are submitted once, as a run: their plan is cached, so they are the same object.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby

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


def plan_batch_item(admission: Admission, item: bytes) -> CheckPlan | Exception:
    """Decode one check of a batch. A Problem with its JSON is the answer to this check, not to the batch."""
    try:
        return plan_or_refusal(admission, decode_check(item))
    except Problem as problem:
        return problem


class BatchPlaces:
    """The caller of equal checks in a row: their verdicts may go to any of their places."""

    __slots__ = ("_batch", "_next")

    has_disconnected = False  # the answer to the other checks is worth as much
    trace_context: TraceContext | None = None

    def __init__(self, batch: "PendingBatch", first: int) -> None:
        self._batch = batch
        self._next = first

    def on_verdict(self, verdict: Verdict | Exception) -> None:
        place, self._next = self._next, self._next + 1
        self._batch.fill(place, verdict)


class PendingBatch:
    def __init__(self, path: str, request_id: str, on_answer: Callable[[BatchAnswer], object]) -> None:
        """`on_answer` gets the answer when all checks have theirs."""
        self._path = path
        self._request_id = request_id
        self._on_answer = on_answer
        self._items: list[BatchItem] = []
        self._left = 0

    def submit(self, admission: Admission, plans: Sequence[CheckPlan | Exception]) -> None:
        self._left = len(plans)
        self._items = [BatchItem(status=0)] * len(plans)
        end = 0
        for _, equal in groupby(plans, key=id):
            plan, *others = equal
            begin, end = end, end + 1 + len(others)
            if isinstance(plan, Exception):
                self.fill(begin, plan)
            else:
                admission.submit(plan, BatchPlaces(self, begin), end - begin)

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
