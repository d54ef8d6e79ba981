"""Read a configuration of Envoy, and ask whether its agents answer."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from leasehold.doctor.envoy_rules import CHECKS_OF, ENVOY_CHECKS, EnvoyFacts, mappings
from leasehold.doctor.probes import reason_of
from protocol.diagnosis.checks import CheckResult, judge, unexamined

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # with empty settings
SETTINGS = 4  # the type of the first frame of every HTTP/2 server
FRAME_HEAD_BYTES = 9


async def examine_envoy(path: Path, timeout_s: float) -> list[CheckResult]:
    """Return the results for each filter of RLS or RLQS in a file. What cannot be read is unknown, with the reason."""
    subject = f"envoy {path}"
    try:
        text = await asyncio.to_thread(path.read_text)
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except (OSError, ValueError, yaml.YAMLError) as error:
        return unexamined(ENVOY_CHECKS, subject, f"it cannot be read: {error}")
    filters = [
        (each, checks)
        for each in mappings(documents)
        for kind, checks in CHECKS_OF.items()
        if str(each.get("@type", "")).endswith(kind)
    ]
    if not filters:
        return unexamined(ENVOY_CHECKS[:1], subject, f"it has no filter of the types {' and '.join(CHECKS_OF)}")
    results: list[CheckResult] = []
    for number, (found, checks) in enumerate(filters):
        facts = await _gather(found, documents, timeout_s)
        results += judge(checks, facts, subject if len(filters) == 1 else f"{subject}, filter {number + 1}")
    return results


async def _gather(found: dict[str, Any], documents: Sequence[object], timeout_s: float) -> EnvoyFacts:
    listed = [each for each in mappings(documents) if "load_assignment" in each and "name" in each]
    clusters = {each["name"]: each for each in listed} or None
    has_descriptors = any(
        each.get("rate_limits") or str(each.get("path", "")).endswith("/rate_limits")  # the latter is a patch
        for each in mappings(documents)
    )
    routes = [each for each in mappings(documents) if "match" in each and each.keys() & {"route", "direct_response"}]
    routes_nothing = bool(routes) and all("direct_response" in each for each in routes)
    facts = EnvoyFacts(found, has_descriptors, clusters, {}, routes_nothing)
    if facts.cluster is None or "transport_socket" in facts.cluster:  # with TLS the files of this machine say nothing
        return facts
    addresses = [each["socket_address"] for each in mappings(facts.cluster) if "socket_address" in each]
    probes = [_probe(each["address"], each["port_value"], timeout_s) for each in addresses]
    return facts._replace(answers=dict(await asyncio.gather(*probes)))


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
