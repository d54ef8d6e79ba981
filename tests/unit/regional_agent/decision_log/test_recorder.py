"""What is noted for the decision log: each denial once a second, a sample of the admissions, and what does not fit."""

from typing import Any

import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from protocol.check import Check, CheckAnswer, DenialCause, PolicyAnswer, Subject
from protocol.decision_log.messages import MAX_LOSSES, DecisionsLost
from protocol.decision_log.sampling import is_sampled
from protocol.limits.document import LimitsDocument, PolicyBundle
from regional_agent.admission.answers import answer_of
from regional_agent.admission.plan import CheckPlan, plan_request
from regional_agent.admission.policies import Policies
from regional_agent.decision_log.losses import Losses
from regional_agent.decision_log.recorder import MOST_WAITING, WINDOW_MS, DecisionRecorder
from regional_agent.decision_log.sender import row_of
from regional_agent.store.types import StoreIncarnation
from tests.unit.regional_agent.leasing.test_quotas import StandingClock

HERE = StoreIncarnation("one life", 7, 4)
DOCUMENT: dict[str, Any] = {
    "quotas": [{"name": "api", "kind": "rate", "limit": "5/second"}],
    "policies": [
        {"name": "search", "quota": "api", "by": ["tenant"], "match": {"route": "/search*"}},
        {"name": "all", "quota": "api", "by": ["user"], "match": {"route": "/all"}},
        {"name": "trial", "quota": "api", "by": ["tenant"], "match": {"route": "/trial"}, "shadow": True},
    ],
}


def bundle_with(samples: dict[str, float], *, has_shadow: bool = True) -> PolicyBundle:
    policies = [each for each in DOCUMENT["policies"] if has_shadow or "shadow" not in each]
    document = msgspec.convert(DOCUMENT | {"policies": policies}, LimitsDocument)
    return PolicyBundle(version=1, document=document, subscriptions={}, weight=1, total_weight=1, samples=samples)


def policies_with(samples: dict[str, float]) -> Policies:
    return Policies(bundle_with(samples))


POLICIES = policies_with({"*": 0.0, "all": 1.0})


def plan(route: str = "/search", policies: Policies = POLICIES, **fields: Any) -> CheckPlan:
    mode = fields.pop("mode", "enforce")
    operation = fields.pop("operation_id", None)
    subject = {"tenant": "acme", "route": route} | fields
    check = Check(subject=msgspec.convert(subject, Subject), mode=mode, operation_id=operation)
    return plan_request(policies, check, subject, 100)


def answer(of: CheckPlan, *, allowed: bool, cause: DenialCause = DenialCause.LIMIT) -> CheckAnswer:
    answers = [
        PolicyAnswer(
            policy=each.policy.name,
            quota="api",
            kind="rate",
            allowed=allowed,
            limit=5,
            share=5,
            remaining=2,
            reset_ms=100,
            retry_after_ms=0 if allowed else 100,
            reason=None if allowed else cause,
            shadow=each.is_shadow,
        )
        for each in of.policy_charges
    ]
    return answer_of(allowed or all(each.shadow for each in answers), None, answers)


class Log:
    """A recorder, its clock and its losses."""

    def __init__(self, rows_per_second: int = 1_000) -> None:
        self.clock = StandingClock()
        self.registry = CollectorRegistry()
        self.losses = Losses(self.registry, self.clock)
        self.recorder = DecisionRecorder(self.clock, self.losses, rows_per_second)
        self.recorder.follow(bundle_with({"*": 0.0, "all": 1.0}))

    def deny(self, of: CheckPlan, times: int = 1, cause: DenialCause = DenialCause.LIMIT) -> None:
        for _ in range(times):
            self.recorder.note(of, answer(of, allowed=False, cause=cause), HERE)

    def admit(self, of: CheckPlan, times: int = 1) -> None:
        for _ in range(times):
            self.recorder.note(of, answer(of, allowed=True), HERE)

    def rows(self) -> list[tuple[str, str | None, str, int, float]]:
        """Return what waits: outcome, reason, tenant, times and weight of each row."""
        found = [row_of(each, POLICIES, 0) for each in self.recorder.take(10_000, closing=True)]
        return [(each.outcome, each.reason, each.subject["tenant"], each.count, each.weight) for each in found]


def test_equal_denials_of_a_second_are_one_row_with_their_number_and_times() -> None:
    log, denied = Log(), plan()
    log.deny(denied, 1_000)
    log.clock.now_ms += 400
    log.deny(plan(), 500)  # another plan of the same request
    log.deny(plan(tenant="bcme"))
    log.deny(denied, cause=DenialCause.STORE)
    rows = [row_of(each, POLICIES, 1_000_000) for each in log.recorder.take(100, closing=True)]
    assert [(each.reason, each.subject["tenant"], each.count) for each in rows] == [
        ("limit", "acme", 1_500),
        ("limit", "bcme", 1),
        ("store", "acme", 1),
    ]
    assert (rows[0].at_ms, rows[0].last_ms, rows[1].last_ms) == (1_001_000, 1_001_400, None)
    [policy] = rows[0].policies
    assert (policy.quota, policy.cost, policy.limit, policy.remaining) == ("api:tenant=acme", 1, 5, 2)
    assert (rows[0].policy, rows[0].epoch, rows[0].retry_after_ms, rows[0].mode) == ("search", 7, 100, "enforce")


def test_a_row_of_denials_is_taken_when_its_second_is_over() -> None:
    log = Log()
    log.deny(plan())
    assert log.recorder.take(10) == []
    log.clock.now_ms += WINDOW_MS
    log.deny(plan(), 3)  # the next second
    [first] = log.recorder.take(10)
    assert first.count == 1
    assert [each[3] for each in log.rows()] == [3]


def test_an_admission_is_kept_as_its_policy_says_with_its_weight() -> None:
    log = Log()
    log.admit(plan(), 50)
    log.admit(plan("/all", user="jane"), 3)
    log.admit(plan("/nowhere"), 50)
    assert log.rows() == [("admitted", None, "acme", 1, 1.0)] * 3
    every_second = policies_with({"*": 0.5})
    log.admit(plan(policies=every_second), 400)
    found = log.rows()
    assert 100 < len(found) < 300
    assert {each[4] for each in found} == {2.0}


def test_the_retries_of_an_operation_are_kept_all_or_none() -> None:
    policies, kept = policies_with({"*": 0.5}), []
    for number in range(40):
        log = Log()
        log.admit(plan(policies=policies, operation_id=f"order-{number}"), 3)
        kept.append(len(log.rows()))
    assert set(kept) == {0, 3}


def test_one_rate_for_all_is_drawn_without_a_look_at_policies() -> None:
    log, policies = Log(), policies_with({"*": 0.5})
    log.recorder.follow(bundle_with({"*": 0.5}, has_shadow=False))
    log.admit(plan(policies=policies), 400)
    log.admit(plan("/nowhere", policies=policies), 400)
    found = log.rows()
    assert 300 < len(found) < 500
    assert {each[4] for each in found} == {2.0}
    operations = [plan(policies=policies, operation_id=f"order-{number}") for number in range(40)]
    for each in operations:
        log.admit(each, 2)
    kept = [is_sampled(each.request.operation.digest, 0.5) for each in operations if each.request.operation]
    assert len(log.rows()) == 2 * sum(kept)
    log.deny(plan(policies=policies), 3)
    assert [each[0] for each in log.rows()] == ["denied"]
    log.recorder.follow(bundle_with({"*": 0.0}, has_shadow=False))
    log.admit(plan(policies=policies), 400)
    assert log.rows() == []


def test_a_shadow_or_another_rate_is_looked_at_again_when_a_document_brings_it() -> None:
    log = Log()
    log.recorder.follow(bundle_with({"*": 0.0}, has_shadow=False))
    log.recorder.follow(bundle_with({"*": 0.0, "all": 1.0}))
    log.admit(plan("/all", user="jane"), 3)
    log.deny(plan("/trial"), 2)
    assert log.rows() == [("admitted", None, "acme", 1, 1.0)] * 3 + [("shadow_denied", "limit", "acme", 2, 1.0)]


def test_what_decides_nothing_is_not_kept() -> None:
    log = Log()
    log.deny(plan(mode="peek"))
    log.admit(plan("/all", user="jane", mode="peek"))
    log.admit(plan("/all", user="jane", mode="refund"))
    assert log.rows() == []


def test_each_denial_of_a_shadow_policy_is_kept() -> None:
    log = Log()
    log.deny(plan("/trial"), 20)
    assert log.rows() == [("shadow_denied", "limit", "acme", 20, 1.0)]


def test_denials_beyond_the_rows_of_a_second_are_counted_as_lost() -> None:
    log = Log(rows_per_second=10)
    for number in range(25):
        log.deny(plan(tenant=f"tenant-{number}"))
    log.clock.now_ms += WINDOW_MS
    log.deny(plan(tenant="tenant-1"), 7)
    assert len(log.rows()) == 11
    assert log.losses.take() == [DecisionsLost(minute_ms=0, count=15)]
    assert log.losses.take() == []
    assert log.registry.get_sample_value("leasehold_decision_log_lost_total", {"reason": "full"}) == 15


def test_the_rows_that_wait_are_bounded() -> None:
    log = Log(rows_per_second=10_000)
    denied = plan()
    for number in range(MOST_WAITING + 5):
        log.deny(replace(denied, subject={"tenant": str(number)}))
    assert len(log.rows()) == MOST_WAITING
    assert log.losses.take() == [DecisionsLost(minute_ms=0, count=5)]


def test_a_log_without_rows_keeps_and_loses_none() -> None:
    log = Log(rows_per_second=0)
    log.deny(plan(), 5)
    log.clock.now_ms += WINDOW_MS
    log.deny(plan(), 5)
    assert (log.rows(), log.losses.take()) == ([], [])


def test_losses_of_very_many_minutes_are_counted_for_the_oldest() -> None:
    log = Log()
    log.losses.add_undelivered([(60_000 * minute, 2) for minute in range(MAX_LOSSES + 3)], "overflow")
    found = log.losses.take()
    assert len(found) == MAX_LOSSES
    assert (found[0], sum(each.count for each in found)) == (DecisionsLost(0, 8), 2 * (MAX_LOSSES + 3))


def test_a_route_is_kept_as_policies_compare_it_and_without_what_cannot_be_stored() -> None:
    log = Log()
    log.deny(plan("/search/?token=secret", api_key="a\x00b\ud800"))
    [row] = [row_of(each, POLICIES, 0) for each in log.recorder.take(10, closing=True)]
    assert row.subject == {"tenant": "acme", "route": "/search", "api_key": "a\ufffdb\ufffd"}
    assert msgspec.json.encode(row)
