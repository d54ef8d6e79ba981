"""Gather the facts that the checks of a store and of an agent judge."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from protocol.addresses import is_loopback
from protocol.clock import Clock
from protocol.diagnosis.checks import CheckResult, UnknownSetting, judge, unexamined
from regional_agent.cluster.rules.slot_map import nodes_of
from regional_agent.diagnosis.facts import AgentFacts, DecisionTimes, StoreFacts
from regional_agent.diagnosis.rules import AGENT_CHECKS, STORE_CHECKS
from regional_agent.leasing.rules.reply_timeout import LONGEST_PAUSE_MS
from regional_agent.settings import AgentSettings, journal_of
from regional_agent.store import keys
from regional_agent.store.address import StoreAddress, StoreSetup
from regional_agent.store.connection import UNREACHABLE, Store, StoreConnection, StoreError, describe
from regional_agent.store.opening import Server, StoreAccess
from regional_agent.store.rules.decision_timeout import DecisionTimeout
from regional_agent.store.scripts import PROBE_TTL_MS
from regional_agent.store.sentinel import Sentinels

if TYPE_CHECKING:
    from regional_agent.agent import RegionalAgent

CONFIG = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite")
MEASURED = 50  # round trips of a store that no agent measures
STORE_S = 5.0
_MILLISECOND = timedelta(milliseconds=1)


# --- by an agent, of itself -------------------------------------------------------------------------------------------


async def examine_agent(region: "RegionalAgent", clock: Clock, unread: Sequence[UnknownSetting]) -> list[CheckResult]:
    """Run the checks of an agent, and those of each server of its store."""
    stores = {cell.store.node: cell.store for cell in region.cells}
    examined = [await _examine_connected(region, store, clock) for store in stores.values()]
    own = judge(AGENT_CHECKS, agent_facts(region, unread), f"agent {region.settings.name}")
    return [*own, *(result for results in examined for result in results)]


def agent_facts(region: "RegionalAgent", unread: Sequence[UnknownSetting]) -> AgentFacts:
    settings, journal = region.settings, journal_of(region.settings)
    return AgentFacts(
        unknown_settings=unread,
        has_state_dir=settings.state_dir is not None,
        has_journal=journal is not None,
        journal_free_bytes=None if journal is None else free_bytes(journal),
        journal_max_bytes=settings.journal_max_bytes,
        coordinator_urls=settings.coordinator_urls,
        exchange_ms=max(cell.quotas.round_trip_ms for cell in region.cells),
        longest_wait_ms=LONGEST_PAUSE_MS,
        log_level=settings.log_level,
    )


def free_bytes(directory: Path) -> int | None:
    """Return the free bytes of the file system that a directory is in, or will be in."""
    try:
        existing = next(each for each in (directory, *directory.parents) if each.exists())
        return shutil.disk_usage(existing).free
    except (OSError, StopIteration):
        return None


async def _examine_connected(region: "RegionalAgent", store: Store, clock: Clock) -> list[CheckResult]:
    settings, subject = region.settings, f"store {store.node}"
    if not store.connected:
        return unexamined(STORE_CHECKS, subject, store.fault)
    timeout = region.decision_timeout
    times = decision_times(timeout, settings.decision_timeout_ms, settings.decision_timeout_max_ms)
    try:
        vouches = settings.store_assume_noeviction
        facts = await read_store(store, settings.store_address(), clock, times, vouches=vouches)
    except UNREACHABLE as error:
        return unexamined(STORE_CHECKS, subject, str(error))
    return judge(STORE_CHECKS, facts, subject)


def decision_times(measured: DecisionTimeout, set_ms: int, most_ms: int) -> DecisionTimes:
    return DecisionTimes(1000 * measured.quantile_s(99), set_ms, most_ms, measured.count)


async def read_store(
    store: Store, address: StoreAddress, clock: Clock, times: DecisionTimes | None, *, vouches: bool
) -> StoreFacts:
    """Read the facts of a store over a connection to it. Raise one of UNREACHABLE."""
    hosts = {address.seeds[0][0]} if address.seeds else set()
    return StoreFacts(
        is_single=address.setup is StoreSetup.SINGLE,
        is_encrypted=address.has_tls,
        is_local=address.path is not None or all(map(is_loopback, hosts)),
        info=dict(_fields(await store.call("INFO"))),
        config=await _read_config(store),
        is_exempt=await store.is_exempt(),
        vouches_for_noeviction=vouches,
        clock_ahead_ms=await _read_clock(store, clock),
        times=times,
    )


def _fields(info: bytes) -> Iterator[tuple[str, str]]:
    for line in info.decode(errors="replace").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name, value


async def _read_config(store: Store) -> dict[str, str] | None:
    try:
        pairs: list[bytes] = await store.call("CONFIG", "GET", *CONFIG)
    except StoreError:
        return None
    return {name.decode(): value.decode() for name, value in zip(pairs[::2], pairs[1::2], strict=True)}


async def _read_clock(store: Store, clock: Clock) -> int | None:
    """Return how far the store's clock is ahead, as far as the round trip does not explain it."""
    asked = clock.now()
    try:
        seconds, micros = await store.call("TIME")
    except StoreError:
        return None
    answered = clock.now()
    theirs = (int(seconds) * 1_000_000 + int(micros)) // 1000
    earliest, latest = (int(moment.timestamp() * 1000) for moment in (asked, answered))
    return min(0, theirs - earliest) or max(0, theirs - latest)


# --- by `leasehold doctor`, of a store that it has the address of -----------------------------------------------------


async def examine_store(address: StoreAddress, access: StoreAccess, clock: Clock) -> list[CheckResult]:
    """Run the checks of a store, of each primary if it is a Cluster, and measure how fast it answers."""
    found: list[CheckResult] = []
    for endpoint, is_node in await _endpoints(address, access):
        try:
            async with _connected(endpoint, is_node=is_node) as connection:
                facts = await read_store(connection, address, clock, await _measured_times(connection), vouches=False)
        except UNREACHABLE as error:
            found += unexamined(STORE_CHECKS, f"store {endpoint}", describe(error))
            continue
        if not is_node or facts.info.get("role") == "master":
            found += judge(STORE_CHECKS, facts, f"store {endpoint}")
    return found


async def _endpoints(address: StoreAddress, access: StoreAccess) -> list[tuple[Server | Sentinels, bool]]:
    if address.setup is StoreSetup.SENTINEL:
        return [(Sentinels(address, access), False)]
    if address.setup is StoreSetup.SINGLE:
        return [(Server(address, access), False)]
    return [(Server(address, access, node), True) for node in sorted(await _nodes(address, access))]


async def _nodes(address: StoreAddress, access: StoreAccess) -> set[tuple[str, int]]:
    """Return the nodes of a Cluster as its first seed that answers knows them."""
    for seed in address.seeds:
        with suppress(*UNREACHABLE):
            async with _connected(Server(address, access, seed), is_node=True) as connection:
                view: bytes = await connection.call("CLUSTER", "NODES")
                return nodes_of([(seed[0], view.decode())], by_name=address.has_tls)
    return set(address.seeds)


@asynccontextmanager
async def _connected(endpoint: Server | Sentinels, *, is_node: bool) -> AsyncIterator[StoreConnection]:
    connection = StoreConnection(endpoint, timeout_ms=int(1000 * STORE_S), is_node=is_node)
    try:
        async with asyncio.timeout(STORE_S):
            await connection.connect()
        yield connection
    finally:
        await connection.close()


async def _measured_times(connection: StoreConnection) -> DecisionTimes:
    """Measure writes of the key that agents probe a store with. Time-outs are those of an agent by default."""
    measured = DecisionTimeout(1, 1)
    for _ in range(MEASURED):
        began = perf_counter()
        await connection.call("SET", keys.PROBE, "1", "PX", PROBE_TTL_MS)
        measured.note([perf_counter() - began])
    fields = AgentSettings.model_fields
    return decision_times(measured, fields["decision_timeout_ms"].default, fields["decision_timeout_max_ms"].default)
