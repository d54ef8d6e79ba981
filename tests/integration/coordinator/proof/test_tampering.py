"""Each way of tampering with what finance reads is found and named at its place, and an honest history is intact.

A case is the SQL of an owner of the database who has switched triggers and constraints off.
"""

import asyncio
from typing import NamedTuple

import pytest

from coordinator.proof.rules import FaultKind, KeptSeal, LedgerFault
from coordinator.proof.seal import seal
from coordinator.proof.verify import verify
from tests.integration.coordinator.admin_harness import Used, open_region
from tests.integration.coordinator.fixtures import NOON, connected
from tests.integration.coordinator.proof.conftest import forging, harness_on
from tests.integration.coordinator.proof.history import (
    ACME,
    CHARGED,
    CREDIT,
    DAY,
    DECEMBER,
    GLOBEX,
    IN_DECEMBER,
    LIMITS,
    MORNING,
    NOVEMBER,
    PROPOSED,
    WITHDRAWN,
    WRITE_OFF,
)

pytestmark = pytest.mark.anyio


class Case(NamedTuple):
    sql: str
    kind: FaultKind
    # The place of the finding; only fields that are not None are compared.
    table: str | None = None
    key: str | None = None
    seal: int | None = None
    period: str | None = None


def is_at(fault: LedgerFault, case: Case) -> bool:
    """Compare the place of a fault with the expected one; a key may be given by its beginning, or by a query."""
    places = ((fault.table, case.table), (fault.seal, case.seal), (fault.period, case.period))
    key = fault.key or ""
    return all(expected in (None, found) for found, expected in places) and key.startswith(case.key or "")


ROLLED = f"WHERE period = '{NOVEMBER}' AND tenant = 'acme' AND region = 'eu-west'"
IN_EU = f"{ACME} in eu-west from 2026-11-18T"

ROLLUPS = {
    "hourly_usage_raised": Case(
        f"UPDATE usage_hour SET units = units + 1000 {ROLLED}",
        FaultKind.ROLLUP_DIFFERS,
        table="usage_hour",
        key=IN_EU,
        period=NOVEMBER,
    ),
    "daily_usage_raised": Case(
        f"UPDATE usage_day SET units = units + 1000 {ROLLED}",
        FaultKind.ROLLUP_DIFFERS,
        table="usage_day",
        key=IN_EU,
        period=NOVEMBER,
    ),
    "usage_of_an_open_period_raised": Case(
        f"UPDATE usage_hour SET units = units + 700 WHERE period = '{DECEMBER}'",
        FaultKind.ROLLUP_DIFFERS,
        table="usage_hour",
        period=DECEMBER,
    ),
    "usage_given_to_another_tenant": Case(
        f"UPDATE usage_day SET tenant = 'hooli' {ROLLED}", FaultKind.ROLLUP_DIFFERS, table="usage_day", key=IN_EU
    ),
    "usage_stored_under_another_name": Case(
        f"UPDATE usage_day SET name = 'mails' {ROLLED}", FaultKind.ROLLUP_DIFFERS, table="usage_day", key=IN_EU
    ),
    "usage_moved_to_another_day": Case(
        f"UPDATE usage_day SET begins_at = begins_at + interval '1 day' {ROLLED}",
        FaultKind.ROLLUP_DIFFERS,
        table="usage_day",
        key=IN_EU,
    ),
    "usage_deleted": Case(f"DELETE FROM usage_day {ROLLED}", FaultKind.ROLLUP_DIFFERS, table="usage_day", key=IN_EU),
    "usage_invented": Case(
        f"INSERT INTO usage_day SELECT * FROM usage_day {ROLLED} LIMIT 1", FaultKind.ROLLUP_DIFFERS, table="usage_day"
    ),
    "usage_given_to_other_labels": Case(
        f"UPDATE labelled_usage SET labels = 'model=small' {ROLLED}",
        FaultKind.ROLLUP_DIFFERS,
        table="labelled_usage",
        key=IN_EU,
    ),
    "usage_of_labels_deleted": Case(
        f"DELETE FROM labelled_usage {ROLLED}", FaultKind.ROLLUP_DIFFERS, table="labelled_usage", key=IN_EU
    ),
    "usage_of_a_period_that_is_not_there": Case(
        f"UPDATE usage_hour SET period = '2026-10' {ROLLED}", FaultKind.ROLLUP_DIFFERS, table="usage_hour", key=ACME
    ),
    "pool_given_to_another_tenant": Case(
        f"UPDATE pool SET tenant = 'hooli' WHERE quota = '{ACME}' AND period = '{DECEMBER}'",
        FaultKind.POOL_CHANGED,
        table="pool",
        key=ACME,
        period=DECEMBER,
    ),
    "pool_stored_under_another_name": Case(
        f"UPDATE pool SET name = 'mails' WHERE quota = '{ACME}' AND period = '{DECEMBER}'",
        FaultKind.POOL_CHANGED,
        table="pool",
        key=ACME,
    ),
    "pool_deleted_with_its_leases_and_usage": Case(
        "".join(
            f"DELETE FROM {table} WHERE quota = '{ACME}' AND period = '{DECEMBER}';"
            for table in ("pool", "lease", "correction", "usage_hour", "usage_day")
        ),
        FaultKind.BALANCE,
        key=ACME,
        period=DECEMBER,
    ),
    "lease_deleted": Case(
        f"DELETE FROM lease WHERE quota = '{ACME}' AND period = '{DECEMBER}'", FaultKind.BALANCE, key=ACME
    ),
    "lease_edited": Case(
        f"UPDATE lease SET granted = granted + 1 WHERE quota = '{ACME}' AND period = '{DECEMBER}'",
        FaultKind.BALANCE,
        key=ACME,
    ),
    "correction_edited": Case(
        "UPDATE correction SET consumed = consumed + 1 WHERE consumed > 0", FaultKind.BALANCE, key=ACME
    ),
    "closed_day_edited": Case(
        f"UPDATE lease SET last_grant = 99 WHERE period = '{DAY}'",
        FaultKind.CLOSED_PERIOD_CHANGED,
        table="period",
        key=DAY,
    ),
}
SOMEBODY = "00000000-0000-0000-0000-00000000000a"


def adjustment(change: str, document: str = CREDIT, seal: int = 2) -> Case:
    """Change one adjustment, whose audit entry is sealed."""
    sql = f"UPDATE adjustment SET {change} WHERE document = '{document}'"
    key = f"SELECT id::text FROM adjustment WHERE document = '{document}'"
    return Case(sql, FaultKind.ADJUSTMENT_CHANGED, table="adjustment", key=key, seal=seal)


def resolution(change: str) -> Case:
    sql = f"UPDATE resolution SET {change} WHERE reason = '{CHARGED}'"
    key = f"SELECT id::text FROM resolution WHERE reason = '{CHARGED}'"
    return Case(sql, FaultKind.RESOLUTION_CHANGED, table="resolution", key=key, seal=2)


def closed_period(change: str, key: str = NOVEMBER) -> Case:
    sql = f"UPDATE period SET {change} WHERE id = '{key}'"
    return Case(sql, FaultKind.PERIOD_CHANGED, table="period", key=key, seal=3, period=key)


SIGNED = {
    "adjustment_reason": adjustment("reason = 'bribe'"),
    "adjustment_document": adjustment("document = 'OTHER-DOC'"),
    "adjustment_approver": adjustment(f"approved_by = '{SOMEBODY}'"),
    "adjustment_approved_earlier": adjustment("approved_at = approved_at - interval '1 day'"),
    "adjustment_people_swapped": adjustment("proposed_by = approved_by, approved_by = proposed_by"),
    "adjustment_units": adjustment("units = units + 1"),
    "adjustment_of_another_quota": adjustment(f"quota = '{GLOBEX}'"),
    "adjustment_taken_back": adjustment("approved_by = NULL, approved_at = NULL, booked_in = NULL"),
    "adjustment_deleted": Case(
        f"DELETE FROM adjustment WHERE document = '{CREDIT}'", FaultKind.ADJUSTMENT_CHANGED, table="adjustment", seal=2
    ),
    "adjustment_invented": Case(
        f"""INSERT INTO adjustment SELECT gen_random_uuid(), quota, period, kind, units, reason, 'NEW', proposed_by,
            proposed_at, expires_at FROM adjustment WHERE document = '{CREDIT}'""",
        FaultKind.ADJUSTMENT_CHANGED,
        table="adjustment",
    ),
    "withdrawn_adjustment_offered_again": adjustment("withdrawn_by = NULL, withdrawn_at = NULL", WITHDRAWN),
    "proposed_adjustment_raised": adjustment("units = 900", PROPOSED),
    "resolution_reason": resolution("reason = 'nothing'"),
    "resolution_approver": resolution(f"approved_by = '{SOMEBODY}'"),
    "resolution_people_swapped": resolution("proposed_by = approved_by, approved_by = proposed_by"),
    "resolution_kind": resolution("kind = 'write_off'"),
    "resolution_deleted": Case(
        f"DELETE FROM resolution WHERE reason = '{CHARGED}'", FaultKind.RESOLUTION_CHANGED, table="resolution", seal=2
    ),
    "retirement_by_somebody_else": Case(
        f"UPDATE region_epoch SET retired_by = '{SOMEBODY}' WHERE state = 'retired'",
        FaultKind.EPOCH_CHANGED,
        table="region_epoch",
        seal=2,
    ),
    "retirement_taken_back": Case(
        "UPDATE region_epoch SET state = 'fenced', retired_at = NULL WHERE state = 'retired'",
        FaultKind.EPOCH_CHANGED,
        table="region_epoch",
        seal=2,
    ),
}
CLOSES = {
    "period_opened_again": closed_period(
        "state = 'open', closed_at = NULL, position = NULL, transfers = NULL, root = NULL"
    ),
    "period_as_if_nobody_had_closed_it": closed_period(
        """state = 'open', close_requested_at = NULL, close_requested_by = NULL, carries_suspense = false,
            closed_at = NULL, position = NULL, transfers = NULL, root = NULL"""
    ),
    "period_closed_by_somebody_else": closed_period(f"close_requested_by = '{SOMEBODY}'"),
    "period_closed_earlier": closed_period("closed_at = closed_at - interval '1 day'"),
    "period_asked_to_close_earlier": closed_period("close_requested_at = close_requested_at - interval '1 day'"),
    "period_without_consent_to_carry": closed_period("carries_suspense = false"),
    "period_root": closed_period("root = sha256('x')", DAY),
    "period_position": closed_period("position = position - 1", DAY),
    "period_deleted": Case(
        f"DELETE FROM period WHERE id = '{DAY}'", FaultKind.PERIOD_CHANGED, table="period", key=DAY, seal=3
    ),
    "open_period_closed": Case(
        f"""UPDATE period SET state = 'closing', close_requested_at = now(), close_requested_by = 'x'
            WHERE id = '{DECEMBER}'""",
        FaultKind.PERIOD_CHANGED,
        table="period",
        key=DECEMBER,
    ),
}
DECIDED = {
    "limits_document": Case(
        "UPDATE limits_version SET document = replace(document::text, '1000', '7777')::jsonb",
        FaultKind.LIMITS_CHANGED,
        table="limits_version",
        key="1",
        seal=1,
    ),
    "limits_applied_by_somebody_else": Case(
        f"UPDATE limits_version SET applied_by = '{SOMEBODY}' WHERE version = 1",
        FaultKind.LIMITS_CHANGED,
        table="limits_version",
        key="1",
    ),
    "limits_version_deleted": Case(
        "DELETE FROM limits_version WHERE version = 1", FaultKind.LIMITS_CHANGED, table="limits_version", key="1"
    ),
    "subscription_changed": Case(
        "UPDATE subscription SET plan = 'free' WHERE tenant = 'acme'",
        FaultKind.SUBSCRIPTION_CHANGED,
        table="subscription",
        key="acme",
        seal=1,
    ),
    "subscription_began_earlier": Case(
        "UPDATE subscription SET began_at = began_at - interval '1 year' WHERE tenant = 'acme'",
        FaultKind.SUBSCRIPTION_CHANGED,
        table="subscription",
        key="acme",
        seal=1,
    ),
    "subscription_deleted": Case(
        "DELETE FROM subscription WHERE tenant = 'acme'",
        FaultKind.SUBSCRIPTION_CHANGED,
        table="subscription",
        key="acme",
        seal=1,
    ),
    "subscription_put_back": Case(
        "INSERT INTO subscription VALUES ('umbrella', 'pro', now(), now())",
        FaultKind.SUBSCRIPTION_CHANGED,
        table="subscription",
        key="umbrella",
    ),
    "override_raised": Case(
        "UPDATE limit_override SET value = '9000'", FaultKind.OVERRIDE_CHANGED, table="limit_override", seal=1
    ),
    "override_deleted": Case("DELETE FROM limit_override", FaultKind.OVERRIDE_CHANGED, table="limit_override", seal=1),
    "token_note": Case(
        "UPDATE token SET note = 'the chief' WHERE note = 'billing, since December'",
        FaultKind.TOKEN_CHANGED,
        table="token",
        seal=4,
    ),
    "token_scopes": Case(
        "UPDATE token SET scopes = '{admin}' WHERE note = 'billing'", FaultKind.TOKEN_CHANGED, table="token", seal=4
    ),
    "token_not_revoked": Case(
        "UPDATE token SET revoked_at = NULL WHERE note = 'billing'", FaultKind.TOKEN_CHANGED, table="token", seal=4
    ),
    "identity_renamed": Case(
        "UPDATE identity SET name = 'Grace Hopper'", FaultKind.IDENTITY_CHANGED, table="identity", seal=4
    ),
    "identity_is_somebody_else": Case(
        "UPDATE identity SET subject = 'grace'", FaultKind.IDENTITY_CHANGED, table="identity", seal=4
    ),
    "region_identity_of_another_region": Case(
        "UPDATE region_identity SET region = 'eu-west'",
        FaultKind.REGION_IDENTITY_CHANGED,
        table="region_identity",
        seal=4,
    ),
    "region_identity_invented": Case(
        "INSERT INTO region_identity VALUES ('thief.example.org', 'us-east', now())",
        FaultKind.REGION_IDENTITY_CHANGED,
        table="region_identity",
    ),
    "identity_deleted": Case("DELETE FROM identity", FaultKind.IDENTITY_CHANGED, table="identity", seal=4),
    "token_invented": Case(
        "INSERT INTO token VALUES (gen_random_uuid(), '\\x00', '{admin}', '', now())",
        FaultKind.TOKEN_CHANGED,
        table="token",
    ),
}
# Both sides of a comparison are edited: the seals prove the audit, and the chains prove the transfers.
BOTH = {
    "adjustment_and_its_entry": Case(
        f"""UPDATE adjustment SET reason = 'bribe' WHERE document = '{CREDIT}';
        UPDATE audit SET details = details || '{{"reason": "bribe"}}' WHERE details ->> 'document' = '{CREDIT}'""",
        FaultKind.SEALED_AUDIT_CHANGED,
        seal=2,
    ),
    "plan_and_its_entry": Case(
        """UPDATE subscription SET plan = 'free' WHERE tenant = 'acme';
        UPDATE audit SET details = details || '{"plan": "free"}' WHERE object = 'acme'""",
        FaultKind.SEALED_AUDIT_CHANGED,
        seal=1,
    ),
    "usage_and_its_transfers": Case(
        f"""UPDATE transfer SET units = units + 1 WHERE dst = 'consumed' AND period = '{DECEMBER}' AND seq IS NOT NULL;
        UPDATE usage_hour SET units = units + 1 WHERE period = '{DECEMBER}';
        UPDATE usage_day SET units = units + 1 WHERE period = '{DECEMBER}'""",
        FaultKind.REPORT_CHANGED,
    ),
    "write_off_and_its_movement": Case(
        f"""UPDATE adjustment SET units = 20 WHERE document = '{WRITE_OFF}';
        UPDATE transfer SET units = 20 FROM adjustment
        WHERE movement_id = adjustment.id AND document = '{WRITE_OFF}'""",
        FaultKind.SEALED_MOVEMENTS_CHANGED,
        seal=2,
    ),
}
CASES = ROLLUPS | SIGNED | CLOSES | DECIDED | BOTH


async def test_an_honest_history_is_intact(history: str) -> None:
    async with connected(history) as owner, owner.transaction(isolation="repeatable_read", readonly=True):
        found = await verify(owner, IN_DECEMBER)
    assert found.fault is None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_tampering_is_found_and_named_at_its_place(history: str, case: Case) -> None:
    async with forging(history) as forger:
        if case.key and case.key.startswith("SELECT"):
            case = case._replace(key=await forger.fetchval(case.key))
        await forger.execute(case.sql)
        found = await verify(forger, IN_DECEMBER)
    assert found.fault is not None, "it was not found"
    assert found.fault.kind is case.kind, found.fault
    assert is_at(found.fault, case), found.fault


async def test_only_a_kept_seal_shows_edits_above_the_last_seal(history: str) -> None:
    """The last two seals are deleted; then no seal covers the entry and the adjustment, which are edited alike."""
    async with forging(history) as forger:
        kept = await forger.fetchrow(
            "SELECT number, encode(hash, 'hex') AS hash FROM seal ORDER BY number DESC LIMIT 1"
        )
        assert kept is not None
        cut = "DELETE FROM seal WHERE number > 2; UPDATE adjustment SET reason = 'bribe' WHERE document = 'TICKET-5'"
        edit = (
            """UPDATE audit SET details = details || '{"reason": "bribe"}' WHERE details ->> 'document' = 'TICKET-5'"""
        )
        await forger.execute(f"{cut};{edit}")
        alone = await verify(forger, IN_DECEMBER)
        compared = await verify(forger, IN_DECEMBER, [KeptSeal(kept["number"], kept["hash"])])
    # Constraints are off here, so a guard is missing; no row was found.
    assert alone.fault is not None
    assert alone.fault.kind is FaultKind.GUARD_CHANGED
    assert compared.fault is not None
    assert (compared.fault.kind, compared.fault.seal) == (FaultKind.KEPT_SEAL_MISSING, kept["number"])


async def test_decisions_during_a_verification_are_not_tampering(database: str) -> None:
    """Each verification sees one moment, in which each row and its entry are both there, or neither is."""
    async with harness_on(database) as admin_harness:
        who = {scope: await admin_harness.caller(scope) for scope in ("admin", "adjust:propose", "adjust:approve")}
        await who["admin"].put("/v1/limits", json=LIMITS)
        region = await open_region(admin_harness, who["admin"], "eu-west")
        await region.use(ACME, NOVEMBER, [Used(MORNING, 60)])

        async def decide(number: int) -> None:
            limits = LIMITS | {"default_plan": ("free", "pro")[number % 2]}
            assert (await who["admin"].put("/v1/limits", json=limits)).status_code == 200
            assert (await who["admin"].put("/v1/subscriptions/acme", json={"plan": "pro"})).status_code in (200, 201)
            terms = {"quota": ACME, "period": NOVEMBER, "kind": "credit", "units": 1, "reason": "x"}
            made = await who["adjust:propose"].post("/v1/adjustments", json=terms | {"document": f"T-{number}"})
            assert (await who["adjust:approve"].post(f"/v1/adjustments/{made.json()['id']}:approve")).status_code == 200
            assert (await who["admin"].delete("/v1/subscriptions/acme")).status_code == 204
            await region.use(ACME, NOVEMBER, [Used(MORNING, 1)])

        async def decide_often() -> None:
            for number in range(15):
                await decide(number)

        deciding = asyncio.create_task(decide_often())
        async with connected(database) as auditor, connected(database) as sealer:
            verified = 0
            while not deciding.done() or not verified:
                async with sealer.transaction():
                    await seal(sealer, NOON)
                async with auditor.transaction(isolation="repeatable_read", readonly=True):
                    found = await verify(auditor, NOON)
                assert found.fault is None
                verified += 1
            await deciding
