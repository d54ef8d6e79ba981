"""Run all checks that the doctor was given addresses for, side by side, each within a time of its own."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from coordinator.diagnosis.examine import read_and_examine_database, unexamined_database
from leasehold.doctor.envoy import examine_envoy
from leasehold.doctor.envoy_rules import ENVOY_CHECKS
from leasehold.doctor.facts import AccessFacts, ClockFacts, ReleaseFacts
from leasehold.doctor.probes import probe_health, probe_tls, read_own_checks, reason_of
from leasehold.doctor.rules import ACCESS_CHECK, CLOCK_CHECK, HEALTH_CHECK, RELEASE_CHECK, TLS_CHECK
from protocol.clock import SystemClock
from protocol.diagnosis.checks import Check, CheckResult, CheckState, failure, judge, result_of, unexamined, unknown
from regional_agent.diagnosis.gather import examine_store
from regional_agent.diagnosis.rules import STORE_CHECKS
from regional_agent.store.address import StoreAddress
from regional_agent.store.opening import StoreAccess

TOKEN, AGENT_TOKEN = "LEASEHOLD_TOKEN", "LEASEHOLD_AGENT_SERVICE_TOKEN"
WORST_FIRST = (CheckState.FAILED, CheckState.WARNING, CheckState.UNKNOWN, CheckState.OK)
_PREFERRED = (CheckState.FAILED, CheckState.WARNING, CheckState.OK, CheckState.UNKNOWN)  # of two about the same


@dataclass(frozen=True)
class Installation:
    """The addresses and credentials of an installation. Tokens and passwords come from the environment."""

    coordinators: Sequence[str]
    agents: Sequence[str]
    token: str | None = None
    agent_token: str | None = None
    database_url: str | None = None
    store_urls: Sequence[str] = ()
    store_access: StoreAccess = field(default_factory=StoreAccess)
    envoy_files: Sequence[Path] = ()
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)
    timeout_s: float = 10.0


class Doctor:
    def __init__(self, installation: Installation, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._installation = installation
        self._on_progress = on_progress
        self._releases: dict[str, str] = {}
        self._clocks: list[ClockFacts] = []

    async def examine(self) -> list[CheckResult]:
        """Return the results of all checks, the worst first."""
        told = self._installation
        async with httpx.AsyncClient(verify=told.tls, timeout=told.timeout_s, trust_env=False) as client:
            parts = [
                *(self._within(HEALTH_CHECK, url, self._coordinator(client, url)) for url in told.coordinators),
                *(self._within(HEALTH_CHECK, url, self._agent(client, url)) for url in told.agents),
                *(self._within(TLS_CHECK, "webhooks", self._webhooks(client, url)) for url in told.coordinators[:1]),
            ]
            parts += [self._database(told.database_url)] if told.database_url else []
            parts += [self._store(url) for url in told.store_urls]
            parts += [
                self._within(ENVOY_CHECKS[0], str(path), examine_envoy(path, told.timeout_s))
                for path in told.envoy_files
            ]
            found = [result for results in await asyncio.gather(*parts) for result in results]
        found += judge([RELEASE_CHECK], ReleaseFacts(self._releases), "installation")
        found += judge([CLOCK_CHECK], next(iter(self._clocks), ClockFacts(None)), "this machine")
        found += [] if told.agents else [_not_given("agents", "no agent was named: --agent URL")]
        return sorted(merged(found), key=lambda each: (WORST_FIRST.index(each.state), each.subject, each.check))

    async def _within(
        self, check: Check[Any], subject: str, examining: Awaitable[list[CheckResult]]
    ) -> list[CheckResult]:
        """Wait for one part, for its time at most: a service that hangs hides nothing of the others."""
        try:
            async with asyncio.timeout(2 * self._installation.timeout_s):
                return await examining
        except Exception as error:  # of any kind: what could not be examined is said, and the rest goes on
            return unexamined([check], subject, f"it could not be examined: {reason_of(error)}")
        finally:
            self._on_progress(f"examined {subject}")

    # --- services -----------------------------------------------------------------------------------------------------

    async def _coordinator(self, client: httpx.AsyncClient, url: str) -> list[CheckResult]:
        subject = f"coordinator {url}"
        asked_at = datetime.now(UTC)
        found, (access, own) = await asyncio.gather(
            self._outside(client, url, subject),
            read_own_checks(
                client, f"{url}/v1/diagnosis", self._installation.token, TOKEN, self._installation.timeout_s
            ),
        )
        answered_at = datetime.now(UTC)
        if own:
            self._releases[subject] = own["release"]
            self._clocks.append(_compared(asked_at, _moment(own["now"]), answered_at))
        results = _results(own.get("checks", ()), {"coordinator": subject})
        return [*found, *judge([ACCESS_CHECK], access, subject), *results]

    async def _agent(self, client: httpx.AsyncClient, url: str) -> list[CheckResult]:
        subject = f"agent {url}"
        found, (access, own) = await asyncio.gather(
            self._outside(client, url, subject),
            read_own_checks(
                client, f"{url}/v1/status", self._installation.agent_token, AGENT_TOKEN, self._installation.timeout_s
            ),
        )
        if "release" in own:
            self._releases[subject] = own["release"]
        results = _results(own.get("checks", ()), {})
        if own and not results:
            results = [_not_given("agents", f"{url} has not run its own checks yet: ask again in a few seconds")]
        return [*found, *judge([ACCESS_CHECK], access, subject), *results]

    async def _outside(self, client: httpx.AsyncClient, url: str, subject: str) -> list[CheckResult]:
        seconds = self._installation.timeout_s
        health, tls = await asyncio.gather(
            probe_health(client, url, seconds), probe_tls(url, self._installation.tls, seconds)
        )
        return [*judge([HEALTH_CHECK], health, subject), *judge([TLS_CHECK], tls, subject)]

    async def _webhooks(self, client: httpx.AsyncClient, url: str) -> list[CheckResult]:
        """Check the certificates of the hosts that events are sent to, as this machine sees them."""
        told = self._installation
        access, found = await read_own_checks(client, f"{url}/v1/webhooks", told.token, TOKEN, told.timeout_s)
        if not found:
            return [_webhooks_unknown(access)]
        hosts = sorted({each["url"] for each in found["data"]})
        facts = await asyncio.gather(*(probe_tls(each, told.tls, told.timeout_s) for each in hosts))
        return [
            result
            for host, each in zip(hosts, facts, strict=True)
            for result in judge([TLS_CHECK], each, f"webhook {host}")
        ]

    # --- what was given an address ------------------------------------------------------------------------------------

    async def _database(self, url: str) -> list[CheckResult]:
        try:
            async with asyncio.timeout(2 * self._installation.timeout_s):
                return await read_and_examine_database(url, SystemClock(), self._installation.timeout_s)
        except Exception as error:  # of any kind, as in `_within`
            reason = f"it could not be examined: {reason_of(error)}"
            # Coordinators may answer for the rest, which would hide that this machine cannot reach it.
            fault = failure(reason, "Look at --database-url, and at the network between it and this machine.")
            unreached = result_of(HEALTH_CHECK, "database from this machine", fault)
            return [unreached, *unexamined_database(reason)]
        finally:
            self._on_progress("examined the database")

    async def _store(self, url: str) -> list[CheckResult]:
        try:
            async with asyncio.timeout(2 * self._installation.timeout_s):
                return await examine_store(StoreAddress.parse(url), self._installation.store_access, SystemClock())
        except Exception as error:  # of any kind, as in `_within`
            return unexamined(STORE_CHECKS, "store", f"it could not be examined: {reason_of(error)}")
        finally:
            self._on_progress("examined a store")


def merged(found: Iterable[CheckResult]) -> list[CheckResult]:
    """Return one result for each check and subject: two agents see one store, and an owner sees more of a database."""
    kept: dict[tuple[str, str], CheckResult] = {}
    for each in found:
        known = kept.get((each.check, each.subject))
        if known is None or _PREFERRED.index(each.state) < _PREFERRED.index(known.state):
            kept[each.check, each.subject] = each
    return list(kept.values())


def _results(checks: Iterable[Any], renamed: dict[str, str]) -> list[CheckResult]:
    """Read results of another release leniently: a newer one may have other states."""
    found = []
    for each in checks:
        subject = renamed.get(each["subject"], each["subject"])
        found.append(msgspec.convert({**each, "subject": subject}, CheckResult))
    return found


def _not_given(subject: str, reason: str) -> CheckResult:
    return result_of(HEALTH_CHECK, subject, unknown(reason))


def _webhooks_unknown(access: AccessFacts) -> CheckResult:
    reason = access.detail or (f"it answered {access.status}" if access.status else "no coordinator answered")
    return result_of(TLS_CHECK, "webhooks", unknown(f"the hosts are not known: {reason}"))


def _compared(asked_at: datetime, theirs: datetime, answered_at: datetime) -> ClockFacts:
    """Compare clocks as far as the round trip does not explain their difference."""
    if theirs < asked_at:
        return ClockFacts(asked_at - theirs)
    return ClockFacts(min(answered_at - theirs, answered_at - answered_at))


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
