"""Operations that were admitted during a store outage are claimed before they are booked."""

import pytest

from regional_agent.admission.rules.hold_ids import HoldId
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Fenced, Operation, OperationClaim, OperationConflict, StoreIncarnation
from tests.lua.script_helpers import available, install, lease_reply, set_aside, take

pytestmark = pytest.mark.anyio

OURS, THEIRS = "a" * 32, "b" * 32
ONCE = Operation("once", "body", 60_000)


async def test_a_script_that_was_executed_has_charged(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    await take(scripts, incarnation, 3, operation=ONCE)
    fresh = Operation("fresh", "body", 60_000)
    assert await scripts.claim_operations(incarnation, OURS, [ONCE, fresh]) == [
        OperationClaim.CHARGED,
        OperationClaim.CLAIMED,
    ]


async def test_a_script_that_is_executed_after_the_claim_charges_nothing(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    """The script waited in a socket of the store after its agent timed out."""
    await install(scripts, incarnation, lease_reply(granted=10))
    await scripts.claim_operations(incarnation, OURS, [ONCE])
    decision = await take(scripts, incarnation, 3, operation=ONCE)
    assert (decision.allowed, decision.replayed) == (True, True)
    assert await available(scripts, incarnation) == 10
    with pytest.raises(OperationConflict):
        await take(scripts, incarnation, 4, operation=ONCE._replace(body="other"))


async def test_a_claim_is_the_same_each_time_and_only_one_journal_has_it(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    for _ in range(2):
        assert await scripts.claim_operations(incarnation, OURS, [ONCE]) == [OperationClaim.CLAIMED]
    assert await scripts.claim_operations(incarnation, THEIRS, [ONCE]) == [OperationClaim.CHARGED]


async def test_an_id_used_for_another_request_is_no_charge_of_this_one(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    await take(scripts, incarnation, 3, operation=ONCE)
    other = ONCE._replace(body="other")
    assert await scripts.claim_operations(incarnation, OURS, [other]) == [OperationClaim.ANOTHER_BODY]


async def test_a_claim_is_forgotten_with_the_window_of_its_operation(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await scripts.claim_operations(incarnation, OURS, [ONCE])
    assert 0 < await scripts.operation_ttl_ms(incarnation, "once") <= 60_000


async def test_any_number_is_claimed_in_calls_of_a_few_hundred(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    many = [Operation(f"operation {number}", "body", 60_000) for number in range(1_201)]
    assert await scripts.claim_operations(incarnation, OURS, many) == [OperationClaim.CLAIMED] * 1_201


async def test_in_another_incarnation_nothing_is_claimed(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    with pytest.raises(Fenced):
        await scripts.claim_operations(incarnation._replace(fingerprint="another"), OURS, [ONCE])
    assert await scripts.operation_ttl_ms(incarnation, "once") < 0


async def remembered(scripts: Scripts, incarnation: StoreIncarnation) -> HoldId:
    await install(scripts, incarnation, lease_reply(granted=10))
    return await set_aside(scripts, incarnation, 3, name="once")


async def test_the_record_of_an_operation_is_found_and_replaced(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    hold = await remembered(scripts, incarnation)
    known = await scripts.find_operation(incarnation, ONCE)
    assert known is not None
    assert (known.hold.id, known.is_concluded, 0 < known.hold.ttl_ms <= 60_000) == (hold, False, True)
    other = hold._replace(others=(HoldId.fresh(7, 4, hold.parts),))
    assert await scripts.replace_operation(incarnation, ONCE, hold, other, is_concluded=False)
    assert not await scripts.replace_operation(incarnation, ONCE, hold, hold, is_concluded=False), (
        "it is another by now"
    )
    assert await scripts.replace_operation(incarnation, ONCE, other, other, is_concluded=True)
    known = await scripts.find_operation(incarnation, ONCE)
    assert known is not None
    assert (known.hold.id, known.is_concluded) == (other, True)
    assert 0 < await scripts.operation_ttl_ms(incarnation, "once") <= 3_600_000


async def test_an_unknown_operation_or_one_with_another_body_is_not_replaced(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    hold = HoldId.fresh(7, 4, ())
    assert await scripts.find_operation(incarnation, ONCE) is None
    assert not await scripts.replace_operation(incarnation, ONCE, hold, hold, is_concluded=True)
    hold = await remembered(scripts, incarnation)
    with pytest.raises(OperationConflict):
        await scripts.find_operation(incarnation, ONCE._replace(body="other"))
    assert not await scripts.replace_operation(incarnation, ONCE._replace(body="other"), hold, hold, is_concluded=True)
    stranger = incarnation._replace(fingerprint="another")
    with pytest.raises(Fenced):
        await scripts.find_operation(stranger, ONCE)
    with pytest.raises(Fenced):
        await scripts.replace_operation(stranger, ONCE, hold, hold, is_concluded=True)
