"""What remains of limits is a histogram by policy, of a sample of the checks."""

from typing import Any

from prometheus_client import CollectorRegistry

from protocol.check import PolicyAnswer
from regional_agent.metrics import SAMPLED_EVERY, CheckCounts


def answer(**changed: Any) -> PolicyAnswer:
    fields: dict[str, Any] = {"policy": "p", "quota": "q", "kind": "rate", "allowed": True, "limit": 300, "share": 100}
    return PolicyAnswer(**(fields | {"remaining": 50, "reset_ms": 0, "retry_after_ms": 0} | changed))


def test_a_part_of_the_checks_is_noted_by_what_remains() -> None:
    counts, registry = CheckCounts(), CollectorRegistry()
    registry.register(counts)
    for answers in (
        [answer(), answer(policy="a", kind="allowance", remaining=30)],
        [answer(remaining=0), answer(policy="u", unlimited=True)],
        [answer(policy="none", limit=0, share=0, remaining=0)],
    ):
        for _ in range(SAMPLED_EVERY):
            counts.note(answers, "enforce")

    def below(policy: str, bound: str) -> float | None:
        return registry.get_sample_value("leasehold_remaining_ratio_bucket", {"policy": policy, "le": bound})

    assert [below("p", bound) for bound in ("0.0", "0.25", "0.5", "+Inf")] == [1, 1, 2, 2]
    assert [below("a", bound) for bound in ("0.05", "0.1", "+Inf")] == [0, 1, 1], "an allowance is one of all regions"
    assert below("u", "+Inf") is below("none", "+Inf") is None
