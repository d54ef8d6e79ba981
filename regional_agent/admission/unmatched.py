"""Requests that no enforced policy matches: they are counted by route class, and allowed, warned about or denied."""

import structlog
from msgspec.structs import replace

from protocol.check import CheckAnswer, Unmatched
from protocol.clock import Clock
from regional_agent.admission.answers import Verdict, answer_of
from regional_agent.admission.log_windows import LogWindows
from regional_agent.admission.plan import CheckPlan
from regional_agent.admission.rules.modes import BEYOND_LIMITS
from regional_agent.metrics import CheckCounts

log = structlog.get_logger()

MAX_LOGGED = 200  # characters of a route


class UnmatchedRequests:
    def __init__(self, counts: CheckCounts, clock: Clock) -> None:
        self._counts = counts
        self._clock = clock
        self._windows = LogWindows()

    def decide(self, plan: CheckPlan) -> Verdict | None:
        """Return the verdict on an unmatched request; None where shadow policies are to be decided, too.

        Work that is done already is never denied.
        """
        assert plan.unmatched is not None
        is_denied = plan.unmatched.answer is Unmatched.DENY and plan.request.mode not in BEYOND_LIMITS
        if plan.policy_charges and not is_denied:
            return None
        answer = self.note(plan, answer_of(not is_denied, None, []))
        return Verdict(replace(answer, retry_after_ms=None) if is_denied else answer, [])

    def note(self, plan: CheckPlan, answer: CheckAnswer) -> CheckAnswer:
        """Count an unmatched request, and return its answer with what the document says of it."""
        found = plan.unmatched
        assert found is not None
        self._counts.unmatched[found.route_class] += 1
        if found.answer is Unmatched.ALLOW:
            return answer
        now_ms = self._clock.monotonic_ms()
        if (suppressed := self._windows.note(found.route_class, now_ms)) is not None:
            log.warning(
                "request matched no policy",
                allowed=answer.allowed,
                route_class=found.route_class,
                route=found.route[:MAX_LOGGED],
                method=found.method,
                suppressed=suppressed,
            )
        return replace(answer, unmatched="warn" if answer.allowed else "deny")
