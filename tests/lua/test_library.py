"""The function library on a real store: loaded wherever it is missing, side by side with others, and cleaned up."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import stop, wait_until
from protocol.identifiers import lane_of
from regional_agent.store import keys
from regional_agent.store.connection import StoreConnection, StoreError, StoreUnavailable
from regional_agent.store.library import UNUSED_S, LibraryRefused
from regional_agent.store.opening import Server
from regional_agent.store.scripts import Scripts
from regional_agent.store.sources import Library, shipped_library
from regional_agent.store.types import (
    AllowanceCharge,
    Outcome,
    RateCharge,
    RequestRun,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
)
from tests.conftest import free_port
from tests.lua.script_helpers import DIMENSIONS, QUOTA, RATE, install, lease_reply, take_rate

pytestmark = pytest.mark.anyio

OURS = shipped_library()
PASSWORD = "of-the-store"


def next_version(number: int = 1) -> Library:
    """Return a library that does the same with another text."""
    return OURS.with_text(lambda text: f"{text}local _ = {number}\n")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[StoreConnection]:
    connection = StoreConnection(Server.at(url), timeout_ms=5_000)
    await connection.connect()
    try:
        yield connection
    finally:
        await connection.close()


async def libraries(connection: StoreConnection) -> set[str]:
    found = await connection.call("FUNCTION", "LIST", "LIBRARYNAME", "leasehold_*")
    return {each[each.index(b"library_name") + 1].decode() for each in found}


def send(scripts: Scripts, incarnation: StoreIncarnation, *charges: RateCharge) -> asyncio.Future[Sequence[Outcome]]:
    """Send a check of each charge, as the batcher does."""
    told = asyncio.get_running_loop().create_future()
    outcomes = list[Outcome]()

    def on_decisions(found: Sequence[Outcome]) -> None:
        outcomes.extend(found)
        if len(outcomes) == len(charges):
            told.set_result(outcomes)

    runs = [RequestRun(StoreRequest("enforce", [charge]), 1, on_decisions) for charge in charges]
    scripts.checks.send(incarnation, runs, lambda _: None)
    return told


TOKEN = RateCharge(RATE, 1, 1_000, 500)


# --- loading ----------------------------------------------------------------------------------------------------------


async def test_flushed_functions_are_loaded_again_and_each_call_runs_once(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    assert (await take_rate(scripts, incarnation)).policies[0].remaining == 9
    await connection.call("FUNCTION", "FLUSH")
    assert (await take_rate(scripts, incarnation)).policies[0].remaining == 8
    await connection.call("FUNCTION", "FLUSH")
    charge = RateCharge(RATE, 1, 1_000, 10)
    (decision,) = await send(scripts, incarnation, charge)
    assert isinstance(decision, StoreDecision)
    assert decision.policies[0].remaining == 7
    assert scripts.library.loads == 3


async def test_functions_that_are_flushed_under_load_deny_nothing(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """Calls that are under way when the functions disappear all run once, behind a single load."""
    sent = list[asyncio.Future[Sequence[Outcome]]]()
    for number in range(100):
        if number % 20 == 10:
            await connection.call("FUNCTION", "FLUSH")
        sent += [send(scripts, incarnation, TOKEN, TOKEN) for _ in range(2)]
    outcomes = [outcome for each in await asyncio.gather(*sent) for outcome in each]
    assert all(isinstance(each, StoreDecision) and each.allowed for each in outcomes)
    peeked = await scripts.check(incarnation, "peek", [TOKEN])
    assert peeked.policies[0].remaining == 500 - len(outcomes) == 100
    assert 2 <= scripts.library.loads <= 6


@contextmanager
def a_store(directory: Path, port: int, more: str = "") -> Iterator[str]:
    process = embedded.start_store(directory / "store", port, PASSWORD, more=more)
    try:
        assert wait_until(lambda: embedded.store_is_ready(port, PASSWORD), 60)
        yield embedded.store_url(port, PASSWORD)
    finally:
        stop(process)


@pytest.mark.parametrize(("more", "loads"), [("", 0), ('appendonly no\nsave ""\n', 1)])
async def test_a_restarted_store_has_its_functions_as_far_as_it_persists(tmp_path: Path, more: str, loads: int) -> None:
    port = free_port()
    with a_store(tmp_path, port, more) as url:
        async with connected(url) as connection:
            await Scripts(connection).begin_incarnation("life-1", "a" * 16)
    with a_store(tmp_path, port, more) as url:
        async with connected(url) as connection:
            scripts = Scripts(connection)
            assert (await scripts.begin_incarnation("life-2", "b" * 16)).nonce == "b" * 16
            assert scripts.library.loads == loads


async def test_a_promoted_replica_has_the_functions_of_its_primary(tmp_path: Path) -> None:
    primary_port, replica_port = free_port(), free_port()
    follow = f"replicaof {embedded.LOOPBACK} {primary_port}\nmasterauth {PASSWORD}\n"
    (tmp_path / "primary").mkdir()
    (tmp_path / "replica").mkdir()
    with (
        a_store(tmp_path / "primary", primary_port) as primary_url,
        a_store(tmp_path / "replica", replica_port, follow) as replica_url,
    ):
        async with connected(primary_url) as primary:
            await Scripts(primary).begin_incarnation("life-1", "a" * 16)

        def told(command: str) -> str:
            return embedded.send_to_store(replica_port, PASSWORD, command)

        assert wait_until(lambda: told("FUNCTION LIST").startswith("*1"), 60)
        assert told("REPLICAOF NO ONE").startswith("+OK")
        async with connected(replica_url) as replica:
            scripts = Scripts(replica)
            assert (await scripts.begin_incarnation("life-2", "b" * 16)).nonce == "b" * 16
            assert scripts.library.loads == 0


# --- versions ---------------------------------------------------------------------------------------------------------


async def test_two_versions_decide_side_by_side_on_the_same_keys(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """One agent tries the next version, and goes back; what each admits is counted for all."""
    canary = Scripts(connection, library=next_version())
    assert canary.library.library.name != scripts.library.library.name
    left = [(await take_rate(each, incarnation)).policies[0].remaining for each in (scripts, canary, scripts, canary)]
    assert left == [9, 8, 7, 6]
    assert await libraries(connection) == {OURS.name, next_version().name}
    went_back = Scripts(connection)
    assert (await take_rate(went_back, incarnation)).policies[0].remaining == 5
    assert went_back.library.loads == 0


async def test_a_library_that_no_agent_uses_is_deleted_and_one_in_use_is_kept(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    canary, abandoned = (Scripts(connection, library=next_version(number)) for number in (1, 2))
    await abandoned.library.note_use()
    await canary.library.note_use()
    await scripts.library.note_use()
    assert await libraries(connection) == {each.library.library.name for each in (scripts, canary, abandoned)}

    now_s = int((await connection.call("TIME"))[0])
    name = abandoned.library.library.name
    await connection.call("HSET", keys.LIBRARIES, name, now_s - UNUSED_S - 10)
    await connection.call("HSET", keys.LIBRARIES, canary.library.library.name, now_s - UNUSED_S + 1_000)
    await scripts.library.note_use()
    assert await libraries(connection) == {OURS.name, canary.library.library.name}
    assert scripts.library.idle_s[OURS.name] == 0
    assert name not in scripts.library.idle_s
    assert scripts.library.idle_s[canary.library.library.name] >= UNUSED_S - 1_000

    assert (await take_rate(abandoned, incarnation)).allowed, "an agent that calls it after all loads it again"
    await scripts.library.note_use()
    assert name in await libraries(connection), "it is known from now on, and not deleted at once"


async def test_libraries_of_others_are_never_deleted(connection: StoreConnection, scripts: Scripts) -> None:
    code = "#!lua name=theirs\nredis.register_function('theirs_f', function() return 1 end)"
    await connection.call("FUNCTION", "LOAD", code)
    await connection.call("HSET", keys.LIBRARIES, "theirs", 1)
    await scripts.library.note_use()
    assert await connection.call("FCALL", "theirs_f", 0) == 1


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("denied", ["function|load", "fcall"])
async def test_a_user_who_may_not_use_functions_gets_a_reason_and_what_is_needed(
    connection: StoreConnection, store: str, denied: str
) -> None:
    await connection.call("ACL", "SETUSER", "agent", "on", ">secret", "~*", "+@all", f"-{denied}")
    async with connected(f"redis://agent:secret@{store.partition('@')[2]}") as own:
        scripts = Scripts(own)
        with pytest.raises(LibraryRefused, match=r"NOPERM.*\+fcall \+function\|load"):
            await scripts.begin_incarnation("life-1", "a" * 16)
        assert scripts.library.refusal
        await connection.call("ACL", "SETUSER", "agent", f"+{denied}")
        assert (await scripts.begin_incarnation("life-1", "a" * 16)).nonce == "a" * 16
        assert not scripts.library.refusal
    await connection.call("ACL", "DELUSER", "agent")


async def test_a_check_that_cannot_load_the_functions_is_a_failure_of_the_store(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await connection.call("FUNCTION", "FLUSH")
    await connection.call("CONFIG", "SET", "maxmemory", 1)
    try:
        (outcome,) = await send(scripts, incarnation, TOKEN)
        assert isinstance(outcome, StoreUnavailable | StoreError)
        assert "OOM" in str(outcome)
    finally:
        await connection.call("CONFIG", "SET", "maxmemory", 0)
    (outcome,) = await send(scripts, incarnation, TOKEN)
    assert isinstance(outcome, StoreDecision)


async def test_a_full_store_admits_nothing_and_still_drops_what_is_acknowledged(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply())
    charge = AllowanceCharge(QUOTA, 3, 1_000, DIMENSIONS)
    await scripts.check(incarnation, "enforce", [charge])
    lane = lane_of(QUOTA, incarnation.lanes)
    frozen = await scripts.freeze(incarnation, lane, [QUOTA])
    await connection.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(StoreError, match="OOM"):
            await scripts.check(incarnation, "enforce", [charge])
        await install(scripts, incarnation, lease_reply(), seq=frozen.seq)
    finally:
        await connection.call("CONFIG", "SET", "maxmemory", 0)
    assert await scripts.frozen_seq(incarnation, lane) is None
    fields = await scripts.lease_fields(incarnation, QUOTA)
    assert fields["consumed"] == "3"
