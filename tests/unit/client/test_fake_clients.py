"""The fake clients of `leasehold.testing` have the interface and the rules of the real ones."""

import inspect

import pytest

from leasehold import AgentUnavailable, AsyncClient, Client, Denied, RequestRejected
from leasehold.testing import AsyncFakeClient, FakeClient

EXPORT = {"tenant": "acme", "route": "/v1/exports", "method": "POST"}


@pytest.mark.parametrize(("fake", "real"), [(FakeClient, Client), (AsyncFakeClient, AsyncClient)])
def test_a_fake_client_has_the_methods_of_the_real_one(fake: type, real: type) -> None:
    assert issubclass(fake, real)
    for name in dir(real):
        if not name.startswith("_"):
            assert inspect.signature(getattr(fake, name)) == inspect.signature(getattr(real, name)), name
            assert name not in vars(fake), f"{name} is another method than the client's"


def test_everything_is_admitted_and_remembered() -> None:
    client = FakeClient()
    assert client.check(EXPORT, cost=3).allowed
    assert [(check.subject.tenant, check.cost) for check in client.agent.checks] == [("acme", 3)]


def test_rules_deny_what_they_match() -> None:
    client = FakeClient()
    client.agent.deny(tenant="acme", retry_after_ms=2000, policy="export", reason="cut_off")
    denied = client.check(EXPORT)
    assert (denied.allowed, denied.denied_by, denied.reason, denied.retry_after_ms) == (
        False,
        "export",
        "cut_off",
        2000,
    )
    assert client.check(EXPORT | {"tenant": "globex"}).allowed
    with pytest.raises(Denied):
        client.hold(EXPORT, units=1, operation_id="a")


def test_rules_are_explained_like_policies() -> None:
    client = FakeClient()
    client.agent.limit(3, policy="export", route="/v1/exports")
    client.agent.deny(policy="chat", tenant="acme", route="/v1/chat")
    found = client.explain(EXPORT, cost=2, costs={"chat": 900})
    assert [(each.policy, each.matches, each.cost) for each in found.policies] == [
        ("export", True, 2),
        ("chat", False, 900),
    ]
    assert [(each.condition, each.wanted) for each in found.policies[1].unmet] == [("match.route", "/v1/chat")]
    assert client.explain({"tenant": "globex"}).unmatched == "allow"
    assert client.agent.checks == [], "nothing was checked"


def test_a_limit_is_spent_by_checks_and_holds_all_or_none() -> None:
    client = FakeClient()
    client.agent.limit(3, route="/v1/exports")
    assert not client.check(EXPORT, cost=4).allowed
    assert client.check(EXPORT, cost=3, mode="peek").allowed
    assert client.check(EXPORT, cost=2).policies[0].remaining == 1
    with client.holding(EXPORT, units=1) as hold:
        assert not client.check(EXPORT).allowed
    assert not hold.is_committed
    assert client.check(EXPORT).allowed, "the released unit is back"


def test_an_operation_is_charged_once() -> None:
    client = FakeClient()
    client.agent.limit(1)
    for _ in range(2):
        assert client.check(EXPORT, operation_id="a").allowed
    with pytest.raises(RequestRejected, match="422"):
        client.check(EXPORT, cost=2, operation_id="a")


def test_a_hold_ends_once() -> None:
    client = FakeClient()
    held = client.hold(EXPORT, units=40, operation_id="a")
    assert client.hold(EXPORT, units=40, operation_id="a").hold_id == held.hold_id
    client.extend(held, 90_000)
    client.commit(held, 25)
    client.commit(held, 25)
    with pytest.raises(RequestRejected, match="409"):
        client.commit(held, 26)
    with pytest.raises(RequestRejected, match="409"):
        client.release(held)
    assert [(hold.units, hold.state, hold.committed) for hold in client.agent.holds] == [(40, "committed", 25)]


def test_a_misspelt_field_is_rejected() -> None:
    client = FakeClient()
    with pytest.raises(RequestRejected, match="tennant"):
        client.check({"tennant": "acme"})
    first, second = client.check_batch([{"subject": {"tennant": "acme"}}, {"subject": EXPORT}])
    assert isinstance(first, RequestRejected)
    assert second.allowed


def test_the_failure_mode_answers_while_the_fake_agent_is_away() -> None:
    client = FakeClient(on_failure="raise")
    client.agent.is_away = True
    with pytest.raises(AgentUnavailable, match="the fake agent is away"):
        client.check(EXPORT)
    closed = FakeClient(agent=client.agent)
    assert closed.check(EXPORT).degraded == "closed"


def test_wait_does_not_sleep() -> None:
    client = FakeClient()
    client.agent.deny(retry_after_ms=3_600_000, times=2)
    assert not client.wait(EXPORT, timeout_s=10).allowed
    assert client.wait(EXPORT, timeout_s=100_000).allowed
    assert client.agent.now_s >= 60


@pytest.mark.anyio
async def test_the_asynchronous_client_is_faked_as_well() -> None:
    client = AsyncFakeClient()
    client.agent.limit(40)

    @client.limited(lambda tenant: EXPORT | {"tenant": tenant})
    async def export(tenant: str) -> str:
        return f"exported for {tenant}"

    assert await export("acme") == "exported for acme"
    async with client.holding(EXPORT, units=39) as hold:
        await hold.commit(39)
    with pytest.raises(Denied):
        await export("acme")
    client.agent.deny(retry_after_ms=100, times=1)
    assert not (await client.wait(EXPORT, timeout_s=1)).allowed


def test_a_fake_agent_counts_costs_by_the_policy_that_they_name() -> None:
    client = FakeClient()
    client.agent.limit(3, policy="requests", tenant="acme")
    client.agent.limit(5_000, policy="tokens", tenant="acme")
    held = client.hold({"tenant": "acme"}, costs={"tokens": 4_000}, operation_id="one")
    assert not client.check({"tenant": "acme"}, costs={"tokens": 1_001}).allowed
    client.commit(held, costs={"tokens": 900})
    decision = client.check({"tenant": "acme"}, costs={"tokens": 1_000})
    assert {each.policy: each.remaining for each in decision.policies} == {"requests": 1, "tokens": 3_100}
    with pytest.raises(RequestRejected):
        client.hold({"tenant": "acme"}, operation_id="two")
