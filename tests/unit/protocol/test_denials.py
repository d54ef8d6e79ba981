"""The detail of a denial says how much would be allowed, where less than the request costs is."""

import pytest

from protocol.check import CheckAnswer, DenialCause, PolicyAnswer
from protocol.denials import denial_of


@pytest.mark.parametrize(
    ("kind", "reason", "share", "remaining", "detail"),
    [
        ("allowance", DenialCause.LIMIT, 993, 993, "its cost is above the 993 of 1000 that are left here"),
        ("allowance", DenialCause.LIMIT, 0, 0, "its limit is used up"),
        ("rate", DenialCause.LIMIT, 333, 2, "its cost is above the 2 of 1000 that are left here"),
        ("rate", DenialCause.NEVER, 333, 333, "its cost is above the 333 of 1000 that this region ever allows at once"),
        ("rate", DenialCause.NEVER, 1000, 9, "its cost is above what the limit ever allows at once"),
        ("allowance", DenialCause.NEVER, 56, 997, "its cost is above what the limit ever allows at once"),
        ("allowance", DenialCause.NO_LEASE, 0, 0, "this region holds no units of it now"),
    ],
)
def test_the_detail_of_a_denial_has_its_figures(
    kind: str, reason: DenialCause, share: int, remaining: int, detail: str
) -> None:
    policy = PolicyAnswer(
        policy="p",
        quota="q",
        kind=kind,
        allowed=False,
        limit=1000,
        share=share,
        remaining=remaining,
        reset_ms=0,
        retry_after_ms=None,
        reason=reason,
    )
    answer = CheckAnswer(allowed=False, degraded=None, policies=[policy], denied_by="p", retry_after_ms=None)
    assert denial_of(answer, "/v1/check", "1").detail.startswith(f"policy 'p' denies this request: {detail}")
