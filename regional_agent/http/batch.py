"""Up to a thousand checks at once: submitted in order, so decided in order, and answered together.

The same check several times in a row (it is remembered, so it is the same object) is submitted once, as a run.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

import structlog

from protocol.check import BatchAnswer, BatchItem, Check
from protocol.denials import status_of_answer
from protocol.problems import PROBLEMS
from regional_agent.admission.engine import Admits, Asked
from regional_agent.http.callers import adjust_forbidden
from regional_agent.http.refusals import REFUSALS, problem_of
from regional_agent.http.schemas import Verdict
from web.bodies import decode
from web.problems import Problem, problem_document

log = structlog.get_logger()


def asked_of(admission: Admits, check: Check) -> Asked | Exception:
    """What a check asks, or why it cannot be decided: an answer of its own within the batch."""
    try:
        return admission.asked(check)
    except REFUSALS as refusal:
        return refusal


def permitted(asked: Asked | Exception, *, may_adjust: bool) -> Asked | Exception:
    """Return what is asked, or the refusal where it is an adjustment and the caller may make none."""
    if may_adjust or isinstance(asked, Exception) or asked.request.mode != "adjust":
        return asked
    return adjust_forbidden()


def read_piece(admission: Admits, piece: bytes) -> Asked | Exception:
    """Decode one check of a batch. A Problem with its JSON is the answer to this check, not to the batch."""
    try:
        return asked_of(admission, decode(piece, Check))
    except Problem as problem:
        return problem


class Batch:
    def __init__(self, path: str, request_id: str, on_answer: Callable[[BatchAnswer], object]) -> None:
        self._path = path
        self._request_id = request_id
        self._on_answer = on_answer
        self._items: list[BatchItem] = []
        self._left = 0

    def submit(self, admission: Admits, checks: Sequence[Asked | Exception]) -> None:
        self._left = len(checks)
        self._items = [BatchItem(status=0)] * len(checks)
        end = 0
        for _, same in groupby(checks, key=id):
            asked, *others = same
            begin, end = end, end + 1 + len(others)
            places = iter(range(begin, end))
            if isinstance(asked, Exception):
                self._tell(places, asked)
            else:
                admission.submit(asked, partial(self._tell, places), end - begin)

    def _tell(self, places: Iterator[int], outcome: Verdict | Exception) -> None:
        """Which of a run of the same checks an outcome is for, nobody can tell: the next."""
        self._items[next(places)] = self._item(outcome)
        self._left -= 1
        if not self._left:
            self._on_answer(BatchAnswer(items=self._items))

    def _item(self, outcome: Verdict | Exception) -> BatchItem:
        """What the check alone would have been answered."""
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
        log.exception("a check of a batch failed")
        return Problem("internal-error", PROBLEMS["internal-error"].explanation)
