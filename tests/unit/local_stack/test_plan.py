"""The ports and addresses of a local stack, and the addresses that are refused."""

from pathlib import Path

import pytest

from leasehold.local_stack.plan import (
    DEFAULT_BASE_PORT,
    DELAY_MS,
    HIGHEST_BASE_PORT,
    REGIONS,
    StackPlan,
    faults_of_urls,
)

DATA = Path("data")


def ports(plan: StackPlan) -> list[int]:
    return [port for port, _ in plan.ports()]


@pytest.mark.parametrize("base", [1024, DEFAULT_BASE_PORT, HIGHEST_BASE_PORT])
def test_every_port_is_a_port_and_has_one_purpose(base: int) -> None:
    planned = ports(StackPlan(DATA, base, wan=True))
    assert len(planned) == len(set(planned)) == 1 + 1 + 4 * len(REGIONS)
    assert min(planned) == base
    assert max(planned) <= 65535


def test_existing_servers_need_no_port() -> None:
    plan = StackPlan(DATA, postgres="postgresql://db/leasehold", stores={"us-east": "redis://cache/0"})
    assert plan.postgres_port not in ports(plan)
    assert plan.store_port("us-east") not in ports(plan)
    assert plan.store_port("eu-west") in ports(plan)
    assert plan.embedded_stores() == ["eu-west", "ap-south"]


def test_agents_reach_the_coordinator_through_relays_only_with_wan() -> None:
    near, far = StackPlan(DATA), StackPlan(DATA, wan=True)
    assert {near.coordinator_url_for(region) for region in REGIONS} == {near.coordinator_url}
    assert far.coordinator_url not in {far.coordinator_url_for(region) for region in REGIONS}


def test_each_region_has_a_delay_of_its_own() -> None:
    assert sorted(DELAY_MS) == sorted(REGIONS)
    assert len(set(DELAY_MS.values())) == len(REGIONS)
    assert all(80 <= 2 * delay_ms <= 200 for delay_ms in DELAY_MS.values())


@pytest.mark.parametrize(
    ("postgres", "stores", "said"),
    [
        ("mysql://me:pa55word@host/db", {}, "--postgres"),
        ("postgresql:me:pa55word", {}, None),
        ("not a url", {}, "--postgres"),
        (None, {"mars": "redis://:pa55word@host/0"}, "mars"),
        (None, {"us-east": "http://:pa55word@host/0"}, "--store us-east"),
        (None, {"us-east": "redis://[pa55word"}, "--store us-east"),
    ],
)
def test_a_wrong_address_is_reported_without_repeating_it(
    postgres: str | None, stores: dict[str, str], said: str | None
) -> None:
    faults = list(faults_of_urls(postgres, stores))
    assert len(faults) == (said is not None)
    assert not any("pa55word" in fault for fault in faults)
    assert all((said or "") in fault for fault in faults)


def test_valid_addresses_have_no_faults() -> None:
    stores = {"us-east": "redis://:x@host:6379/0", "eu-west": "unix:///run/redis.sock"}
    assert not list(faults_of_urls("postgresql://me:x@host:5432/db", stores))
