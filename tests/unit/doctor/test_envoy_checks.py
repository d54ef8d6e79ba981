"""`leasehold doctor --envoy` names the faults that people paste most."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from leasehold.doctor.envoy import SETTINGS, examine_envoy
from leasehold.doctor.envoy_rules import CHECKS_OF, FILTER, QUOTA_BUCKETS, QUOTA_FILTER, EnvoyFacts
from protocol.diagnosis.checks import CheckState, judge

EXAMPLE = Path(__file__).parents[3] / "examples" / "envoy" / "envoy.yaml"
GOOD: dict[str, Any] = {
    "domain": "edge",
    "timeout": "0.25s",
    "rate_limit_service": {
        "transport_api_version": "V3",
        "grpc_service": {"envoy_grpc": {"cluster_name": "leasehold"}},
    },
}
CLUSTER: dict[str, Any] = {"name": "leasehold", "http2_protocol_options": {}, "health_checks": [{}]}


def states(cluster: dict[str, Any] | None = CLUSTER, *, answers: Any = (), sends: bool = True, **changed: Any) -> Any:
    clusters = None if cluster is None else {cluster["name"]: cluster}
    facts = EnvoyFacts(GOOD | changed, sends, clusters, dict(answers))
    return {each.check.removeprefix("envoy_"): each.state.value for each in judge(CHECKS_OF[FILTER], facts, "envoy")}


def test_a_good_configuration_has_no_faults() -> None:
    assert set(states(answers=[("a:1", "")]).values()) == {"ok"}
    assert set(states(None)) == {"filter", "descriptors", "timeout"}, "with xDS a file has no clusters"


@pytest.mark.parametrize(
    ("options", "check", "state"),
    [
        ({"domain": ""}, "filter", "failed"),
        ({"rate_limit_service": {"grpc_service": {}}}, "filter", "failed"),
        ({"cluster": CLUSTER | {"name": "other"}}, "filter", "failed"),
        ({"enable_x_ratelimit_headers": "DRAFT_VERSION_03"}, "filter", "warning"),
        ({"sends": False}, "descriptors", "warning"),
        ({"timeout": "0.02s"}, "timeout", "warning"),
        ({"timeout": "a while"}, "timeout", "unknown"),
        ({"cluster": {"name": "leasehold", "health_checks": [{}]}}, "cluster", "failed"),
        ({"cluster": {"name": "leasehold", "http2_protocol_options": {}}}, "cluster", "warning"),
        ({"answers": [("a:1", ""), ("b:1", "refused")]}, "door", "failed"),
    ],
)
def test_each_fault_is_named(options: dict[str, Any], check: str, state: str) -> None:
    assert states(**options)[check] == state


def test_the_default_timeout_is_too_short() -> None:
    facts = EnvoyFacts({name: value for name, value in GOOD.items() if name != "timeout"}, True, None, {})
    [found] = [each for each in judge(CHECKS_OF[FILTER], facts, "envoy") if each.check == "envoy_timeout"]
    assert found.state is CheckState.WARNING
    assert found.found == "after 0.02s requests pass without a limit (failure_mode_deny)"


BUCKETS: dict[str, Any] = {
    "@type": f"type.googleapis.com/{QUOTA_BUCKETS}",
    "reporting_interval": "1s",
    "no_assignment_behavior": {"fallback_rate_limit": {"blanket_rule": "DENY_ALL"}},
    "expired_assignment_behavior": {"fallback_rate_limit": {}, "expired_assignment_behavior_timeout": "1s"},
}
PROXY = {"key": "x-leasehold-proxy", "value": "edge-1"}
SERVER: dict[str, Any] = {"envoy_grpc": {"cluster_name": "leasehold"}, "initial_metadata": [PROXY]}
KEPT_ALIVE = {"name": "leasehold", "http2_protocol_options": {"connection_keepalive": {}}}


def quota_states(buckets: dict[str, Any] = BUCKETS, cluster: Any = KEPT_ALIVE, **changed: Any) -> Any:
    """Return the states of a filter of the quota protocol; a setting of a bucket that is None is missing."""
    action = {name: value for name, value in buckets.items() if value is not None}
    routes_nothing = changed.pop("routes_nothing", False)
    given = {"domain": "edge", "rlqs_server": SERVER, "bucket_matchers": {"on_no_match": {"action": action}}} | changed
    facts = EnvoyFacts(given, False, {cluster["name"]: cluster}, {}, routes_nothing)
    found = judge(CHECKS_OF[QUOTA_FILTER], facts, "envoy")
    return {each.check.removeprefix("envoy_quota_"): each.state.value for each in found}


def test_a_good_configuration_of_the_quota_protocol_has_no_faults() -> None:
    assert quota_states() == dict.fromkeys(("filter", "buckets", "fallbacks", "routes", "cluster"), "ok")


@pytest.mark.parametrize(
    ("options", "check", "state"),
    [
        ({"domain": ""}, "filter", "failed"),
        ({"cluster": KEPT_ALIVE | {"name": "other"}}, "filter", "failed"),
        ({"rlqs_server": SERVER | {"initial_metadata": []}}, "filter", "warning"),
        ({"bucket_matchers": {}}, "buckets", "failed"),
        ({"buckets": BUCKETS | {"reporting_interval": "10s"}}, "buckets", "failed"),
        ({"buckets": BUCKETS | {"reporting_interval": None}}, "buckets", "failed"),
        ({"buckets": BUCKETS | {"no_assignment_behavior": None}}, "fallbacks", "warning"),
        ({"buckets": BUCKETS | {"expired_assignment_behavior": {"fallback_rate_limit": {}}}}, "fallbacks", "failed"),
        ({"routes_nothing": True}, "routes", "warning"),
        ({"cluster": {"name": "leasehold"}}, "cluster", "failed"),
        ({"cluster": {"name": "leasehold", "http2_protocol_options": {}}}, "cluster", "warning"),
    ],
)
def test_each_fault_of_the_quota_protocol_is_named(options: dict[str, Any], check: str, state: str) -> None:
    assert quota_states(**options)[check] == state


def test_the_example_of_the_quota_protocol_is_examined() -> None:
    found = {each.check: each.state.value for each in asyncio.run(examine_envoy(EXAMPLE.with_name("quota.yaml"), 0.1))}
    assert found.pop("envoy_door") == "failed", "no agent runs there"
    assert set(found.values()) == {"ok"}
    assert found.keys() == {check.code for check in CHECKS_OF[QUOTA_FILTER]} - {"envoy_door"}


async def door(first: bytes) -> tuple[asyncio.Server, int]:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(("kind", "state"), [(SETTINGS, "ok"), (0, "failed"), (None, "failed")])
def test_the_example_is_examined_with_its_agents(kind: int | None, state: str, tmp_path: Path) -> None:
    async def examine() -> Any:
        server, port = await door(b"" if kind is None else bytes((0, 0, 0, kind, 0, 0, 0, 0, 0)))
        config = yaml.safe_load(EXAMPLE.read_text().replace("8412", str(port)))
        path = tmp_path / "envoy.yaml"
        path.write_text(yaml.safe_dump(config))
        async with server:
            return await examine_envoy(path, 30)

    found = {each.check: each.state.value for each in asyncio.run(examine())}
    assert found.pop("envoy_door") == state
    assert set(found.values()) == {"ok"}
    assert len(found) == len(CHECKS_OF[FILTER]) - 1


@pytest.mark.parametrize("name", ["istio.yaml", "envoy-gateway.yaml"])
def test_snippets_of_other_gateways_are_examined(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(EXAMPLE.with_name(name).read_text().replace("leasehold-agent.leasehold.svc, ", "127.0.0.1, "))
    found = {each.check: each.state.value for each in asyncio.run(examine_envoy(path, 1)) if each.check != "envoy_door"}
    assert {"envoy_filter", "envoy_descriptors", "envoy_timeout"} <= found.keys()
    assert set(found.values()) == {"ok"}


def test_what_is_no_configuration_is_unknown(tmp_path: Path) -> None:
    for text in ("{", "a: b", ""):
        path = tmp_path / "envoy.yaml"
        path.write_text(text)
        assert {each.state.value for each in asyncio.run(examine_envoy(path, 1))} == {"unknown"}
    assert {each.state.value for each in asyncio.run(examine_envoy(tmp_path / "none", 1))} == {"unknown"}
