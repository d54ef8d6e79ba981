"""A sealed position is final: all later commits are above it. Real connections wait for each other here."""

import asyncio
from datetime import timedelta

import asyncpg
import pytest

from coordinator.database.connection import Connection
from coordinator.proof import seal as seal_module
from coordinator.proof.rules import Seal, genesis_head
from coordinator.proof.seal import Sealed, find_sealed, read_seals, seal
from coordinator.proof.verify import verify
from tests.integration.coordinator.admin_harness import Region, Used, open_region
from tests.integration.coordinator.fixtures import NOON, connected
from tests.integration.coordinator.proof.conftest import MONTH, POOLS, do_something, harness_on

pytestmark = pytest.mark.anyio


async def begin(owner: Connection) -> None:
    await owner.execute("INSERT INTO region (name, created_at) VALUES ('us-east', $1)", NOON)
    await owner.execute(
        "INSERT INTO region_epoch (region, nonce, fingerprint, lanes, opened_at) VALUES ('us-east', 'n', 'f', 9, $1)",
        NOON,
    )
    heads = [genesis_head(1, lane) for lane in range(9)]
    lanes = "SELECT 1, number - 1, 0, NULL, head FROM unnest($1::bytea[]) WITH ORDINALITY AS heads (head, number)"
    await owner.execute(f"INSERT INTO lane {lanes}", heads)


async def book(connection: Connection, lane: int) -> int:
    """Insert a report without transfers, which has a position, and do not commit it yet."""
    position: int = await connection.fetchval(
        "INSERT INTO report (epoch, lane, seq, body_hash, head, lines, recorded_at) VALUES (1, $1, 1, '', '', 0, $2) "
        "RETURNING position",
        lane,
        NOON,
    )
    return position


async def move(owner: Connection) -> None:
    """Insert a movement of the coordinator's own, which has no position."""
    await owner.execute(
        """INSERT INTO period (id, kind, starts_at, ends_at) VALUES ('2026-11', 'month', '2026-11-01', '2026-12-01');
        INSERT INTO pool (quota, period, name) VALUES ('q', '2026-11', 'q');
        INSERT INTO transfer (quota, period, charge_period, src, dst, units, cause, movement_id, recorded_at)
        VALUES ('q', '2026-11', '2026-11', 'funding', 'unallocated', 1, 'funded', gen_random_uuid(), now())"""
    )


async def sealed_by(connection: Connection) -> Seal:
    async with connection.transaction():
        return await seal(connection, NOON)


async def is_waiting_for_the_gate(owner: Connection, sessions: int = 1) -> bool:
    found = "SELECT count(*) FROM pg_locks WHERE relation = 'position_gate'::regclass AND NOT granted"
    return bool(await owner.fetchval(found) == sessions)


async def until_somebody_waits(owner: Connection, sessions: int = 1) -> None:
    async with asyncio.timeout(60):
        while not await is_waiting_for_the_gate(owner, sessions):  # noqa: ASYNC110 - it is waited for in Postgres
            await asyncio.sleep(0.005)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the sealer's timeout, so that it does not give up on a slow machine."""
    statement = "coordinator.proof.seal._SNAPSHOT_BEHIND_THE_GATE"
    monkeypatch.setattr(statement, seal_module._SNAPSHOT_BEHIND_THE_GATE.replace("'1s'", "'20s'"))


async def test_a_seal_waits_for_uncommitted_positions(database: str, patience: None) -> None:
    """The later position is committed first: without the gate the earlier one would join the seal."""
    async with connected(database) as owner, connected(database) as slow, connected(database) as sealer:
        await begin(owner)
        transaction = slow.transaction()
        await transaction.start()
        earlier = await book(slow, 0)
        later = await book(owner, 1)
        assert earlier < later
        sealing = asyncio.create_task(sealed_by(sealer))
        await until_somebody_waits(owner)
        await transaction.commit()
        sealed = await sealing
        assert (sealed.position, sealed.reports) == (later, 2)


async def test_reports_during_the_wait_get_a_position_above_the_seal(database: str, patience: None) -> None:
    async with (
        connected(database) as owner,
        connected(database) as slow,
        connected(database) as late,
        connected(database) as sealer,
    ):
        await begin(owner)
        transaction = slow.transaction()
        await transaction.start()
        earlier = await book(slow, 0)
        sealing = asyncio.create_task(sealed_by(sealer))
        await until_somebody_waits(owner)
        coming = asyncio.create_task(book(late, 1))
        await until_somebody_waits(owner, 2)
        await transaction.commit()
        assert (await sealing).position == earlier
        assert await coming > earlier
        assert (await sealed_by(sealer)).reports == 1


async def test_the_snapshot_is_taken_behind_the_gate_and_blocks_no_report(database: str) -> None:
    """A report between the snapshot and the end of the sealing is neither delayed nor in the seal."""
    async with connected(database) as owner, connected(database) as sealer:
        await begin(owner)
        first = await book(owner, 0)
        async with sealer.transaction():
            sealed = await seal(sealer, NOON)
            second = await asyncio.wait_for(book(owner, 1), 60)
            assert await sealer.fetchval("SELECT max(position) FROM report") == first
        assert (sealed.position, second > first) == (first, True)


async def test_a_sealer_gives_up_before_it_delays_all_reports(database: str) -> None:
    async with connected(database) as owner, connected(database) as slow:
        await begin(owner)
        async with slow.transaction():
            await book(slow, 0)
            with pytest.raises(asyncpg.LockNotAvailableError):
                async with asyncio.timeout(60):
                    await sealed_by(owner)
        assert (await sealed_by(owner)).number == 1


@pytest.mark.parametrize("table", ["transfer", "report", "audit"])
async def test_every_booking_statement_passes_the_gate(database: str, table: str) -> None:
    async with connected(database) as owner:
        found = await owner.fetch(
            """SELECT tgname FROM pg_trigger WHERE tgrelid = $1::regclass AND tgfoid = 'pass_position_gate'::regproc
            AND tgtype = 6 AND tgenabled = 'O'""",  # before, insert, for each statement
            table,
        )
    assert len(found) == 1


async def test_seals_are_append_only(database: str) -> None:
    async with connected(database) as owner:
        await sealed_by(owner)
        for change in ("UPDATE seal SET position = 9", "DELETE FROM seal", "TRUNCATE seal"):
            with pytest.raises(asyncpg.RaiseError, match="append-only"):
                await owner.execute(change)


async def test_a_time_selects_the_newest_seal_up_to_it(database: str) -> None:
    async with harness_on(database) as admin_harness:
        owner, clock = admin_harness.owner, admin_harness.clock
        assert await find_sealed(owner, NOON) is None
        await begin(owner)
        await book(owner, 0)
        clock.time = NOON
        first = await sealed_by(owner)
        await book(owner, 1)
        second = await sealed_by(owner)  # by a clock that stands still, or has gone back
        await move(owner)
        third = await sealed_by(owner)  # of the same position
        assert (third.position, third.transfer > second.transfer) == (second.position, True)
        assert first.sealed_at < second.sealed_at < third.sealed_at
        assert await find_sealed(owner, first.sealed_at) == Sealed(first.position, first.transfer)
        assert await find_sealed(owner, second.sealed_at) == Sealed(second.position, second.transfer)
        assert await find_sealed(owner, third.sealed_at) == Sealed(second.position, second.transfer)
        assert await find_sealed(owner, third.sealed_at + timedelta(microseconds=1)) is None
        assert await find_sealed(owner, first.sealed_at - timedelta(microseconds=1)) is None
        assert await find_sealed(owner, second.position) == Sealed(second.position, second.transfer)
        assert await find_sealed(owner, second.position + 1) is None
        assert [shown.number for shown in await read_seals(owner, None, 10)] == [3, 2, 1]
        assert [shown.number for shown in await read_seals(owner, 2, 10)] == [1]


async def test_an_honest_ledger_is_intact_while_it_is_written(database: str) -> None:
    async with harness_on(database) as admin_harness:
        admin = await admin_harness.caller("admin")
        limits = {
            "plans": {"free": {}},
            "default_plan": "free",
            "quotas": [{"name": "exports", "kind": "allowance", "limit": 1_000_000, "period": "month"}],
            "policies": [],
        }
        assert (await admin.put("/v1/limits", json=limits)).status_code == 200
        regions = [await open_region(admin_harness, admin, name) for name in ("us-east", "eu-west", "ap-south")]
        pools = [quota for quota, period in POOLS if period == MONTH]
        written = asyncio.gather(*(write(region, pools) for region in regions))
        found = 0
        async with connected(database) as auditor, connected(database) as sealer:
            while not written.done() or not found:
                async with sealer.transaction():
                    await seal(sealer, NOON)
                await do_something(admin_harness.owner, found, NOON)
                async with auditor.transaction(isolation="repeatable_read", readonly=True):
                    verification = await verify(auditor, NOON)
                assert verification.intact, verification
                found += 1
            await written
            async with auditor.transaction(isolation="repeatable_read", readonly=True):
                verification = await verify(auditor, NOON)
        assert (verification.intact, verification.reports) == (True, 3 * 40)


async def write(region: Region, pools: list[str]) -> None:
    for number in range(20):
        await region.use(pools[number % len(pools)], MONTH, [Used(NOON, 3)])
