"""Denials are sampled by reason in the log, with a hash of the tenant, and lines left out are counted."""

import hashlib

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from protocol.check import DenialCause, PolicyAnswer
from regional_agent.admission.answers import answer_of
from regional_agent.admission.denial_lines import DenialLines
from regional_agent.admission.log_windows import LINES, WINDOW_MS

ACME = {"tenant": "acme"}


def denied(cause: DenialCause) -> PolicyAnswer:
    return PolicyAnswer(
        policy="export",
        quota="exports",
        kind="allowance",
        allowed=False,
        limit=10,
        share=10,
        remaining=3,
        reset_ms=5,
        retry_after_ms=1_000,
        reason=cause,
    )


def test_a_few_denials_of_each_reason_are_logged_and_the_rest_is_counted() -> None:
    registry = CollectorRegistry()
    lines_of = DenialLines(registry)
    with capture_logs() as lines:
        for cause in (DenialCause.LIMIT, DenialCause.CUT_OFF):
            for _ in range(1_000):
                lines_of.note(ACME, answer_of(False, None, [denied(cause)]), 0)
    assert [line["reason"] for line in lines] == ["limit"] * LINES + ["cut_off"] * LINES
    assert (
        registry.get_sample_value("leasehold_denial_log_lines_suppressed_total", {"reason": "limit"}) == 1_000 - LINES
    )
    with capture_logs() as later:
        lines_of.note(ACME, answer_of(False, None, [denied(DenialCause.LIMIT)]), WINDOW_MS)
    assert [(line["reason"], line["suppressed"]) for line in later] == [("limit", 1_000 - LINES)]


def test_a_line_names_the_tenant_by_a_hash_and_has_the_reason() -> None:
    with capture_logs() as lines:
        DenialLines(CollectorRegistry()).note(ACME, answer_of(False, None, [denied(DenialCause.DRAINED)]), 0)
    [line] = lines
    assert line["tenant_hash"] == hashlib.blake2b(b"acme", digest_size=6).hexdigest()
    assert (line["policy"], line["reason"], line["status"], line["remaining"]) == ("export", "drained", 429, 3)
    assert "acme" not in str(line)
