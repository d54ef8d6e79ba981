"""Lines in the log about denials: enough to see that a tenant is denied and why, a few in a second at most.

Each has a short hash of the tenant instead of its name, so only someone who knows the name finds its lines.
"""

import hashlib
from collections.abc import Mapping

import structlog
from prometheus_client import CollectorRegistry

from protocol.check import CheckAnswer, cause_of_denial
from protocol.denials import status_of_answer
from regional_agent.admission.log_windows import LogWindows
from web.declared_metrics import DeclaredMetrics, counter

log = structlog.get_logger()

HASH_BYTES = 6


class DenialLines(DeclaredMetrics):
    _suppressed = counter(
        "leasehold_denial_log_lines_suppressed",
        "Denials that were not logged, because enough of the same reason were.",
        "reason",
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._windows = LogWindows()

    def note(self, subject: Mapping[str, str], answer: CheckAnswer, now_ms: int) -> None:
        """Log a denial, unless enough of the same reason were logged lately. There are few reasons."""
        reason = "blocked" if answer.blocked_by is not None else str(cause_of_denial(answer) or "unknown")
        suppressed = self._windows.note(reason, now_ms)
        if suppressed is None:
            self._suppressed.labels(reason).inc()
            return
        denying = next((each for each in answer.policies if each.policy == answer.denied_by), None)
        log.info(
            "request denied",
            reason=reason,
            policy=answer.denied_by,
            tenant_hash=tenant_hash(subject.get("tenant")),
            status=status_of_answer(answer),
            degraded=answer.degraded,
            remaining=None if denying is None else denying.remaining,
            retry_after_ms=answer.retry_after_ms,
            suppressed=suppressed,
        )


def tenant_hash(tenant: str | None) -> str | None:
    """Return the hash that `printf %s TENANT | b2sum -l 48` prints."""
    return None if tenant is None else hashlib.blake2b(tenant.encode(), digest_size=HASH_BYTES).hexdigest()
