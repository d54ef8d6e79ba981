"""Check a configuration of Envoy: the faults that people paste most, and whether its agents answer."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from leasehold.doctor.probes import reason_of
from protocol.diagnosis.checks import Check, CheckResult, Verdict, failure, judge, passed, unexamined, unknown, warning

FILTER = "envoy.extensions.filters.http.ratelimit.v3.RateLimit"
DEFAULT_TIMEOUT_S = 0.02
SHORTEST_TIMEOUT_S = 0.1  # an agent waits so long for its store, where that is slow, and answers by the failure modes
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # with empty settings
SETTINGS = 4  # the type of the first frame of every HTTP/2 server
FRAME_HEAD_BYTES = 9
_DURATION = re.compile(r"(\d+(?:\.\d+)?)s")


class EnvoyFacts(NamedTuple):
    """One rate limit filter, with what the same file says of it."""

    filter: dict[str, Any]
    has_descriptors: bool  # a route or virtual host says which descriptors to send
    clusters: dict[str, dict[str, Any]] | None  # None: the file has none, as with xDS
    answers: dict[str, str]  # by address of an agent: empty, or why no HTTP/2 server answers

    @property
    def cluster_name(self) -> str | None:
        service = self.filter.get("rate_limit_service", {}).get("grpc_service", {})
        name: str | None = service.get("envoy_grpc", {}).get("cluster_name")
        return name

    @property
    def cluster(self) -> dict[str, Any] | None:
        return None if self.clusters is None else self.clusters.get(self.cluster_name or "")


def judge_filter(facts: EnvoyFacts) -> Verdict:
    if not facts.filter.get("domain"):
        return failure("the filter has no domain")
    version = facts.filter.get("rate_limit_service", {}).get("transport_api_version")
    if version != "V3":
        return failure(f"transport_api_version is {version or 'not set'}: Envoy refuses everything but V3")
    if facts.clusters is not None and facts.cluster_name is not None and facts.cluster is None:
        return failure(f"there is no cluster {facts.cluster_name!r}")
    if facts.filter.get("enable_x_ratelimit_headers") == "DRAFT_VERSION_03":
        return warning("Envoy adds X-RateLimit headers beside those that the agent sends, so clients see two of each")
    return passed(f"domain {facts.filter['domain']}")


def judge_descriptors(facts: EnvoyFacts) -> Verdict:
    if facts.has_descriptors:
        return passed("descriptors are sent")
    return warning("no route and no virtual host has rate_limits, so Envoy asks for no request")


def judge_timeout(facts: EnvoyFacts) -> Verdict:
    text = str(facts.filter.get("timeout", f"{DEFAULT_TIMEOUT_S}s"))
    found = _DURATION.fullmatch(text)
    if found is None:
        return unknown(f"timeout is {text}")
    what_then = "get status 500" if facts.filter.get("failure_mode_deny") else "pass without a limit"
    said = f"after {text} requests {what_then} (failure_mode_deny)"
    return warning(said) if float(found[1]) < SHORTEST_TIMEOUT_S else passed(said)


def judge_cluster(facts: EnvoyFacts) -> Verdict | None:
    if facts.cluster is None:
        return None
    if "http2_protocol_options" not in str(facts.cluster) and "auto_config" not in str(facts.cluster):
        return failure("the cluster has no http2_protocol_options, and gRPC is HTTP/2")
    if not facts.cluster.get("health_checks"):
        return warning("the cluster has no health_checks, so Envoy asks agents that shut down or cannot decide")
    return passed("HTTP/2, with health checks")


def judge_door(facts: EnvoyFacts) -> Verdict | None:
    if not facts.answers:
        return None
    faults = [f"{address}: {fault}" for address, fault in facts.answers.items() if fault]
    if faults:
        return failure("; ".join(faults))
    return passed(f"{', '.join(facts.answers)} answers as HTTP/2")


ENVOY_CHECKS: tuple[Check[EnvoyFacts], ...] = (
    Check(
        "envoy_filter",
        "The rate limit filter of a configuration of Envoy (`--envoy`).",
        "Two services add the same headers.",
        "It lacks its domain or its cluster, or it is not V3.",
        "See docs/guides/envoy.md#configure-envoy.",
        judge_filter,
    ),
    Check(
        "envoy_descriptors",
        "Whether routes say which descriptors Envoy sends.",
        "None does.",
        "",
        "Add rate_limits to the route, see docs/guides/envoy.md#configure-envoy.",
        judge_descriptors,
    ),
    Check(
        "envoy_timeout",
        "How long Envoy waits for an agent, and what it does then.",
        "It waits less than an agent may need (0.1 s); the default is 0.02 s.",
        "",
        "Set timeout: 0.25s in the filter.",
        judge_timeout,
    ),
    Check(
        "envoy_cluster",
        "The cluster of the agents.",
        "It has no health checks.",
        "It has no HTTP/2.",
        "See the cluster in examples/envoy/envoy.yaml.",
        judge_cluster,
    ),
    Check(
        "envoy_door",
        "Whether the agents of the cluster answer at these addresses, as this machine sees them.",
        "",
        "Nothing answers, or no HTTP/2 server.",
        "Set LEASEHOLD_AGENT_GRPC_PORT at the agents, and look at the network between.",
        judge_door,
    ),
)


async def examine_envoy(path: Path, timeout_s: float) -> list[CheckResult]:
    """Return the results for each rate limit filter in a file. What cannot be read is unknown, with the reason."""
    subject = f"envoy {path}"
    try:
        text = await asyncio.to_thread(path.read_text)
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except (OSError, ValueError, yaml.YAMLError) as error:
        return unexamined(ENVOY_CHECKS, subject, f"it cannot be read: {error}")
    filters = [each for each in _mappings(documents) if str(each.get("@type", "")).endswith(FILTER)]
    if not filters:
        return unexamined(ENVOY_CHECKS[:1], subject, f"it has no filter of the type {FILTER}")
    results: list[CheckResult] = []
    for number, found in enumerate(filters):
        facts = await _gather(found, documents, timeout_s)
        results += judge(ENVOY_CHECKS, facts, subject if len(filters) == 1 else f"{subject}, filter {number + 1}")
    return results


async def _gather(found: dict[str, Any], documents: Sequence[object], timeout_s: float) -> EnvoyFacts:
    listed = [each for each in _mappings(documents) if "load_assignment" in each and "name" in each]
    clusters = {each["name"]: each for each in listed} or None
    has_descriptors = any(
        each.get("rate_limits") or str(each.get("path", "")).endswith("/rate_limits")  # the latter is a patch
        for each in _mappings(documents)
    )
    facts = EnvoyFacts(found, has_descriptors, clusters, {})
    if facts.cluster is None or "transport_socket" in facts.cluster:  # with TLS the files of this machine say nothing
        return facts
    addresses = [each["socket_address"] for each in _mappings(facts.cluster) if "socket_address" in each]
    probes = [_probe(each["address"], each["port_value"], timeout_s) for each in addresses]
    return facts._replace(answers=dict(await asyncio.gather(*probes)))


def _mappings(value: object) -> Iterator[dict[str, Any]]:
    """Yield all mappings within a value, the outer ones first."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _mappings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _mappings(each)


async def _probe(host: str, port: int, timeout_s: float) -> tuple[str, str]:
    """Return an address, and why no HTTP/2 server answers there."""
    address = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(PREFACE)
                head = await reader.readexactly(FRAME_HEAD_BYTES)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        return address, reason_of(error)
    return address, "" if head[3] == SETTINGS else "what answers is no HTTP/2 server"
