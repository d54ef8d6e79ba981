"""Judge a configuration of Envoy, for RLS and RLQS: the faults that people paste most."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from protocol.diagnosis.checks import Check, Verdict, failure, passed, unknown, warning

FILTER = "envoy.extensions.filters.http.ratelimit.v3.RateLimit"
QUOTA_FILTER = "envoy.extensions.filters.http.rate_limit_quota.v3.RateLimitQuotaFilterConfig"
QUOTA_BUCKETS = "envoy.extensions.filters.http.rate_limit_quota.v3.RateLimitQuotaBucketSettings"
PROXY_HEADER = "x-leasehold-proxy"
LONGEST_REPORT_S = 2.0  # an agent takes a proxy for silent after three
DEFAULT_TIMEOUT_S = 0.02
SHORTEST_TIMEOUT_S = 0.1  # an agent waits so long for its store, where that is slow, and answers by the failure modes
NO_HTTP2 = "the cluster has no http2_protocol_options, and gRPC is HTTP/2"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)s")


def mappings(value: object) -> Iterator[dict[str, Any]]:
    """Yield all mappings within a value, the outer ones first."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from mappings(each)
    elif isinstance(value, list):
        for each in value:
            yield from mappings(each)


class EnvoyFacts(NamedTuple):
    """One filter of either protocol, with what the same file says of it."""

    filter: dict[str, Any]
    has_descriptors: bool  # a route or virtual host says which descriptors to send
    clusters: dict[str, dict[str, Any]] | None  # None: the file has none, as with xDS
    answers: dict[str, str]  # by address of an agent: empty, or why no HTTP/2 server answers
    routes_nothing: bool = False  # no route leads to a cluster, and some answer by themselves

    @property
    def service(self) -> dict[str, Any]:
        """Return the gRPC service that the filter calls."""
        rls = self.filter.get("rate_limit_service", {}).get("grpc_service", {})
        found: dict[str, Any] = self.filter.get("rlqs_server", rls)
        return found

    @property
    def cluster_name(self) -> str | None:
        name: str | None = self.service.get("envoy_grpc", {}).get("cluster_name")
        return name

    @property
    def buckets(self) -> list[dict[str, Any]]:
        """Return the bucket settings of a filter of the quota protocol."""
        return [each for each in mappings(self.filter) if str(each.get("@type", "")).endswith(QUOTA_BUCKETS)]

    @property
    def cluster(self) -> dict[str, Any] | None:
        return None if self.clusters is None else self.clusters.get(self.cluster_name or "")


def judge_filter(facts: EnvoyFacts) -> Verdict:
    if not facts.filter.get("domain"):
        return failure("the filter has no domain")
    version = facts.filter.get("rate_limit_service", {}).get("transport_api_version")
    if version != "V3":
        return failure(f"transport_api_version is {version or 'not set'}: Envoy refuses everything but V3")
    if (fault := _cluster_fault(facts)) is not None:
        return fault
    if facts.filter.get("enable_x_ratelimit_headers") == "DRAFT_VERSION_03":
        return warning("Envoy adds X-RateLimit headers beside those that the agent sends, so clients see two of each")
    return passed(f"domain {facts.filter['domain']}")


def _cluster_fault(facts: EnvoyFacts) -> Verdict | None:
    if facts.clusters is not None and facts.cluster_name is not None and facts.cluster is None:
        return failure(f"there is no cluster {facts.cluster_name!r}")
    return None


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
    if not _speaks_http2(facts.cluster):
        return failure(NO_HTTP2)
    if not facts.cluster.get("health_checks"):
        return warning("the cluster has no health_checks, so Envoy asks agents that shut down or cannot decide")
    return passed("HTTP/2, with health checks")


def _speaks_http2(cluster: dict[str, Any]) -> bool:
    return "http2_protocol_options" in str(cluster) or "auto_config" in str(cluster)


def judge_quota_filter(facts: EnvoyFacts) -> Verdict:
    if not facts.filter.get("domain"):
        return failure("the filter has no domain")
    if (fault := _cluster_fault(facts)) is not None:
        return fault
    names = {str(each.get("key", "")).lower() for each in facts.service.get("initial_metadata", [])}
    if PROXY_HEADER not in names:
        return warning(f"initial_metadata has no {PROXY_HEADER}: after a reset a proxy waits for what it had to expire")
    return passed(f"domain {facts.filter['domain']}")


def judge_quota_buckets(facts: EnvoyFacts) -> Verdict:
    if not facts.buckets:
        return failure("bucket_matchers has no bucket settings, so Envoy limits no request")
    for each in facts.buckets:
        text = str(each.get("reporting_interval", ""))
        found = _DURATION.fullmatch(text)
        if found is None:
            return failure(f"reporting_interval is {text or 'missing'}")
        if float(found[1]) > LONGEST_REPORT_S:
            return failure(f"reporting_interval is {text}: an agent takes a proxy for silent after 3s")
    return passed(f"{len(facts.buckets)} bucket settings")


def judge_quota_fallbacks(facts: EnvoyFacts) -> Verdict | None:
    expired = [each["expired_assignment_behavior"] for each in facts.buckets if "expired_assignment_behavior" in each]
    if any("fallback_rate_limit" in each and "expired_assignment_behavior_timeout" not in each for each in expired):
        return failure("expired_assignment_behavior has no timeout (expired_assignment_behavior_timeout): it is zero")
    if any("no_assignment_behavior" not in each for each in facts.buckets):
        return warning("no_assignment_behavior is missing: Envoy admits everything of a new bucket")
    return passed("each bucket has a behavior without an assignment") if facts.buckets else None


def judge_quota_routes(facts: EnvoyFacts) -> Verdict:
    if facts.routes_nothing:
        return warning("routes have direct_response and lead to no cluster: such requests are never limited")
    return passed("not all routes answer by themselves")


def judge_quota_cluster(facts: EnvoyFacts) -> Verdict | None:
    if facts.cluster is None:
        return None
    if not _speaks_http2(facts.cluster):
        return failure(NO_HTTP2)
    if "connection_keepalive" not in str(facts.cluster) and not facts.cluster.get("health_checks"):
        return warning("the cluster has no connection_keepalive, so Envoy does not notice agents that are silent")
    return passed("HTTP/2, and silent agents are noticed")


def judge_door(facts: EnvoyFacts) -> Verdict | None:
    if not facts.answers:
        return None
    faults = [f"{address}: {fault}" for address, fault in facts.answers.items() if fault]
    if faults:
        return failure("; ".join(faults))
    return passed(f"{', '.join(facts.answers)} answers as HTTP/2")


RLS_CHECKS: tuple[Check[EnvoyFacts], ...] = (
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
)
QUOTA_CHECKS: tuple[Check[EnvoyFacts], ...] = (
    Check(
        "envoy_quota_filter",
        "The filter of the quota protocol (RLQS) of a configuration of Envoy (`--envoy`).",
        "It does not name the proxy.",
        "It lacks its domain or its cluster.",
        "See docs/guides/envoy-quota.md#configuration.",
        judge_quota_filter,
    ),
    Check(
        "envoy_quota_buckets",
        "How requests become buckets, and how often Envoy reports these.",
        "",
        "There are none, or they are reported more seldom than every 2 s.",
        "Set reporting_interval: 1s, see docs/guides/envoy-quota.md#configuration.",
        judge_quota_buckets,
    ),
    Check(
        "envoy_quota_fallbacks",
        "What Envoy admits without an assignment.",
        "Everything, until the first assignment.",
        "`expired_assignment_behavior` has no time-out.",
        "See no_assignment_behavior and expired_assignment_behavior in examples/envoy/quota.yaml.",
        judge_quota_fallbacks,
    ),
    Check(
        "envoy_quota_routes",
        "Whether routes are limited by the quota protocol.",
        "All have `direct_response`, which the filter does not limit.",
        "",
        "Route requests to a cluster, see docs/guides/envoy-quota.md#configuration.",
        judge_quota_routes,
    ),
    Check(
        "envoy_quota_cluster",
        "The cluster of the agents, for the quota protocol.",
        "Nothing there notices an agent that is silent.",
        "It has no HTTP/2.",
        "See the cluster in examples/envoy/quota.yaml.",
        judge_quota_cluster,
    ),
)
DOOR_CHECKS: tuple[Check[EnvoyFacts], ...] = (
    Check(
        "envoy_door",
        "Whether the agents of the cluster answer at these addresses, as this machine sees them.",
        "",
        "Nothing answers, or no HTTP/2 server.",
        "Set LEASEHOLD_AGENT_GRPC_PORT at the agents, and look at the network between.",
        judge_door,
    ),
)


ENVOY_CHECKS = (*RLS_CHECKS, *QUOTA_CHECKS, *DOOR_CHECKS)
CHECKS_OF = {FILTER: (*RLS_CHECKS, *DOOR_CHECKS), QUOTA_FILTER: (*QUOTA_CHECKS, *DOOR_CHECKS)}
