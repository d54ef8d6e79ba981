"""What customers read of a denial: no names of policies, quotas or parts of Leasehold."""

import msgspec
import pytest

from leasehold.client.agent_protocol import Decision, RequestRejected
from leasehold.middleware.refusals import headers_to_forward, refuse_denied, refuse_undecided
from protocol.check import BlockField, DenialCause, FailureMode, PolicyAnswer

SECRET = "internal-name"


def denied(
    cause: DenialCause | None, degraded: FailureMode | None = None, blocked_by: BlockField | None = None
) -> Decision:
    policy = PolicyAnswer(
        policy=SECRET,
        quota=SECRET,
        kind="allowance",
        allowed=False,
        limit=9,
        share=0,
        remaining=0,
        reset_ms=9,
        retry_after_ms=1500,
    )
    return Decision(
        allowed=False,
        degraded=degraded,
        policies=[msgspec.structs.replace(policy, reason=cause)],
        denied_by=None if blocked_by else SECRET,
        retry_after_ms=None if cause is DenialCause.NEVER else 1500,
        blocked_by=blocked_by,
    )


@pytest.mark.parametrize(
    ("decision", "status", "kind"),
    [
        *((denied(cause), 429, "quota-exceeded") for cause in DenialCause if cause is not DenialCause.NEVER),
        (denied(DenialCause.NEVER), 429, "cost-above-limit"),
        (denied(None, blocked_by=BlockField.TENANT), 429, "blocked"),
        (denied(DenialCause.STORE, "closed"), 503, "not-ready"),
        (denied(DenialCause.CUT_OFF, "closed"), 503, "not-ready"),
        (Decision(allowed=False, degraded="closed", retry_after_ms=1500), 503, "not-ready"),
    ],
)
def test_customers_read_what_concerns_them(decision: Decision, status: int, kind: str) -> None:
    refusal = refuse_denied(decision, "/v1/exports", "r-1", show_policies=False)
    document = msgspec.json.decode(refusal.body)
    assert (refusal.status, document["type"], document["status"]) == (status, f"/problems/{kind}", status)
    text = refusal.body.decode().lower()
    assert not [word for word in (SECRET, "store", "lease", "region", "coordinator", "polic") if word in text]
    assert ("retry-after" in refusal.headers) is (decision.retry_after_ms is not None)
    shown = refuse_denied(decision, "/v1/exports", "r-1", show_policies=True)
    assert ("policies" in msgspec.json.decode(shown.body), "policies" in document) == (True, False)


def test_policies_have_the_same_number_in_both_headers() -> None:
    headers = {
        "ratelimit-policy": '"a, b";q=9;w=60, "slots";q=5;qu="concurrent-requests"',
        "ratelimit": '"a, b";r=1;t=2, "slots";r=0',
        "x-ratelimit-limit": "9",
    }
    decision = Decision(allowed=True, degraded=None, headers=headers)
    assert headers_to_forward(decision, show_policies=False) == {
        "ratelimit-policy": '"limit-1";q=9;w=60, "limit-2";q=5;qu="concurrent-requests"',
        "ratelimit": '"limit-1";r=1;t=2, "limit-2";r=0',
        "x-ratelimit-limit": "9",
    }
    assert headers_to_forward(decision, show_policies=True) == headers


def test_a_mistake_of_the_service_is_no_answer_to_its_customer() -> None:
    with pytest.raises(RequestRejected):
        refuse_undecided(RequestRejected(422, {"title": "Invalid request"}), "/v1/exports", "r-1")
    refusal = refuse_undecided(RequestRejected(503, {"type": "/problems/not-ready"}), "/v1/exports", "r-1")
    assert (refusal.status, refusal.headers["retry-after"]) == (503, "1")
