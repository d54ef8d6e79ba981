"""Every guard of the schema has a trial: a statement that it alone refuses, or that works only through it.

The list of guards is read from the database, so a new one without a trial fails. Each trial is made twice: with the
guard, which must refuse it by name, and with the guard dropped, when the statement must succeed. So no guard hides
behind another, and dropping any of them from a migration fails the first test.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

import asyncpg
import pytest

from coordinator.database.connection import Connection
from migrations.roles import COORDINATOR

pytestmark = pytest.mark.anyio

# A valid row of each table, as SQL. `{}` in a trial's change is SQL as well.
ROWS: dict[str, dict[str, str]] = {
    "region": {"name": "'s'", "created_at": "now()"},
    "region_identity": {"identity": "'a.example'", "region": "'r'", "created_at": "now()"},
    "region_epoch": {"epoch": "2", "region": "'r'", "nonce": "'m'", "fingerprint": "'f'", "lanes": "4"}
    | {"state": "'fenced'", "opened_at": "now()"},
    "lane": {"epoch": "1", "lane": "1", "head": "''"},
    "period": {"id": "'2026-12'", "kind": "'month'", "starts_at": "'2026-12-01'", "ends_at": "'2027-01-01'"},
    "pool": {"quota": "'p'", "period": "'2026-11'", "name": "'p'"},
    "lease": {"epoch": "1", "quota": "'q'", "period": "'2026-11'", "region": "'r'"}
    | {"reported_at": "now()", "expires_at": "now()"},
    "correction": {"epoch": "1", "quota": "'q'", "charge_period": "'2026-10'", "period": "'2026-11'"}
    | {"region": "'r'"},
    "report": {"epoch": "1", "lane": "0", "seq": "1", "position": "7", "body_hash": "''", "head": "''"}
    | {"lines": "0", "recorded_at": "now()"},
    "transfer": {"id": "1", "period": "'2026-11'", "quota": "'q'", "src": "'outstanding'", "dst": "'consumed'"}
    | {"units": "3", "cause": "'usage'", "region": "'r'", "epoch": "1", "lane": "0", "seq": "1", "line": "0"}
    | {"window_at": "'2026-11-18 09:05Z'", "charge_period": "'2026-11'", "recorded_at": "now()"},
    "quarantine": {"epoch": "1", "lane": "0", "seq": "1", "quota": "'q'", "period": "'2026-11'", "reason": "'x'"}
    | {"evidence": "'{}'", "recorded_at": "now()"},
    "usage_hour": {"begins_at": "'2026-11-18 10:00Z'", "period": "'2026-11'", "quota": "'q'", "name": "'q'"}
    | {"region": "'r'", "units": "1", "charge_period": "'2026-11'"},
    "usage_day": {"begins_at": "'2026-11-19 00:00Z'", "period": "'2026-11'", "quota": "'q'", "name": "'q'"}
    | {"region": "'r'", "units": "1", "charge_period": "'2026-11'"},
    "labelled_usage": {"begins_at": "'2026-11-18 10:00Z'", "period": "'2026-11'", "quota": "'q'", "name": "'q'"}
    | {"region": "'r'", "units": "1", "charge_period": "'2026-11'", "labels": "'model=large'"},
    "label_set": {"quota": "'q'", "period": "'2026-11'", "labels": "'model=large'"},
    "limits_version": {"version": "1", "document": "'{}'", "applied_at": "now()", "applied_by": "'x'"},
    "subscription": {"tenant": "'acme'", "plan": "'pro'", "changed_at": "now()"},
    "identity": {"id": "gen_random_uuid()", "issuer": "'i'", "subject": "'s'", "name": "''", "first_seen_at": "now()"},
    "token": {"id": "gen_random_uuid()", "hash": "'x'", "scopes": "'{admin}'", "created_at": "now()"},
    "audit": {"id": "1", "recorded_at": "now()", "actor": "'x'", "action": "'region.put'", "object": "'r'"}
    | {"details": "'{}'"},
    "seal": {"number": "1", "previous": "''", "position": "0", "transfer": "0", "audit": "0", "reports": "0"}
    | {"reports_hash": "''", "movements": "0", "movements_hash": "''", "entries": "0", "entries_hash": "''"}
    | {"balances": "'{}'", "sealed_at": "'2026-11-18 09:05Z'", "hash": "'x'"},
    "job": {"name": "'seal'", "due_at": "now()"},
    "export": {"id": f"'{'0' * 32}'", "period": "'2026-11'", "format": "'csv'", "seal": "1", "is_final": "false"}
    | {"requested_by": f"'{'0' * 32}'", "requested_at": "now()"},
    "export_part": {"export": f"'{'1' * 32}'", "starts_at": "0", "body": "'x'"},
    "verification": {"id": f"'{'0' * 32}'", "requested_by": f"'{'0' * 32}'", "requested_at": "now()"},
    "limit_override": {"id": f"'{'0' * 32}'", "key": "'q:'", "quota": "'q'", "subject": "'{}'", "value": "'1'"}
    | {"valid_from": "now()", "reason": "'x'", "created_at": "now()", "created_by": "'x'"},
    "block": {"field": "'tenant'", "value": "'t'", "reason": "'x'", "created_at": "now()", "created_by": "'x'"},
    "reset": {"number": "1", "quota": "'q'", "subject": "'{}'", "keys": "'{q:}'", "reason": "'x'"}
    | {"created_at": "now()", "created_by": "'x'"},
    "idempotency_record": {"caller": f"'{'0' * 32}'", "key": "'k'", "request_hash": "''", "claim": f"'{'0' * 32}'"}
    | {"claimed_at": "now()"},
    "resolution": {"id": f"'{'0' * 32}'", "epoch": "1", "lane": "0", "seq": "1", "kind": "'rebase'"}
    | {"suspense": "0", "charged": "0", "reason": "'x'", "proposed_by": f"'{'1' * 32}'", "proposed_at": "now()"},
    "adjustment": {"id": f"'{'0' * 32}'", "quota": "'q'", "period": "'2026-10'", "kind": "'credit'", "units": "1"}
    | {"reason": "'x'", "document": "'x'", "proposed_by": f"'{'1' * 32}'", "proposed_at": "now()"}
    | {"expires_at": "now()"},
    "webhook": {"id": f"'{'1' * 32}'", "url": "'https://w'", "events": "'{period.closed}'", "secret": "'x'"}
    | {"created_at": "now()", "created_by": "'x'"},
    "outbox": {"id": f"'{'1' * 32}'", "kind": "'period.closed'", "data": "'{}'", "occurred_at": "now()"},
    "delivery": {"event": f"'{'0' * 32}'", "webhook": f"'{'0' * 32}'", "next_attempt_at": "now()"},
    "region_setting": {"key": "'q:'", "region": "'r'", "weight": "1", "changed_at": "now()", "changed_by": "'x'"},
    "rebalance": {"id": f"'{'1' * 32}'", "version": "2", "mode": "'drain'", "request": "'{}'", "plan": "'{}'"}
    | {"region": "'r'", "recalled": "0", "state": "'running'", "created_at": "now()", "created_by": "'x'"},
    "rebalance_move": {"rebalance": f"'{'0' * 32}'", "number": "1", "quota": "'q'", "period": "'2026-11'"}
    | {"source": "'r'", "units": "1"},
    "floor_hold": {"quota": "'q'", "period": "'2026-11'", "region": "'r'", "units": "1", "until": "now()"}
    | {"rebalance": f"'{'0' * 32}'"},
    "shared_limit": {"quota": "'q'", "state": "''", "reported_at": "now()"},
    "alembic_version": {"version_num": "'x'"},
    "tenant": {"id": "'acme'", "profile": "'{}'", "changed_at": "now()"},
    "archive": {"period": "'2026-11'", "requested_by": f"'{'0' * 32}'", "requested_at": "now()"},
    "archived_sum": {"period": "'2026-11'", "charge_period": "'2026-11'", "quota": "'q'", "epoch": "1", "lane": "0"}
    | {"src": "'outstanding'", "dst": "'consumed'", "cause": "'usage'", "units": "3", "transfers": "1"},
    "decision": {"at": "'2026-11-18 09:00Z'", "id": f"'{'0' * 32}'", "tenant": "'acme'", "region": "'r'"}
    | {"agent": "'x'", "outcome": "'denied'", "weight": "1", "times": "1"},
}
ARCHIVED = {"location": "'/x'", "folder": "'x'", "manifest_sha256": "''", "transfers": "1", "first_position": "1"} | {
    "last_position": "1",
    "last_transfer": "1",
    "usage_sha256": "''",
    "archived_at": "now()",
}
APPROVED = {"approved_by": f"'{'2' * 32}'", "approved_at": "now()"}
BOOKED = APPROVED | {"booked_in": "'2026-11'"}
WITHDRAWN = {"withdrawn_by": f"'{'1' * 32}'", "withdrawn_at": "now()"}
OF_A_LEASE = {"lane": "NULL", "seq": "NULL", "kind": "'charge'", "quota": "'q'", "period": "'2026-11'"}
ANOTHER = {"id": f"'{'3' * 32}'"}
PARENTS = """
INSERT INTO region (name, created_at) VALUES ('r', now());
INSERT INTO region_epoch (epoch, region, nonce, fingerprint, lanes, opened_at)
    OVERRIDING SYSTEM VALUE VALUES (1, 'r', 'n', 'f', 4, now());
INSERT INTO lane (epoch, lane, head) VALUES (1, 0, '');
INSERT INTO period (id, kind, starts_at, ends_at) VALUES ('2026-11', 'month', '2026-11-01', '2026-12-01');
INSERT INTO pool (quota, period, name) VALUES ('q', '2026-11', 'q');
INSERT INTO webhook (id, url, events, secret, created_at, created_by)
    VALUES ('00000000000000000000000000000000', 'https://w', '{x.y}', 'x', now(), 'x');
INSERT INTO outbox (id, kind, data, occurred_at) VALUES ('00000000000000000000000000000000', 'x.y', '{}', now());
INSERT INTO export (id, period, format, seal, is_final, requested_by, requested_at)
    VALUES ('11111111111111111111111111111111', '2026-11', 'parquet', 1, false,
    '00000000000000000000000000000000', now());
INSERT INTO rebalance (id, version, mode, request, plan, recalled, state, created_at, created_by)
    OVERRIDING SYSTEM VALUE
    VALUES ('00000000000000000000000000000000', 1, 'move', '{}', '{}', 0, 'running', now(), 'x');
SELECT keep_decisions('2026-11-18', '2026-11-18', '2026-11-18');
"""


class Trial(NamedTuple):
    """A trial: the guard refuses the last statement; or, with a question, its answer is true thanks to the guard."""

    table: str
    statements: Sequence[str]
    question: str | None = None
    named: str | None = None  # the name of the guard in Postgres's refusal, if it differs


def row(table: str, changes: Mapping[str, str] | None = None) -> str:
    values = ROWS[table] | dict(changes or {})
    return f"INSERT INTO {table} ({', '.join(values)}) OVERRIDING SYSTEM VALUE VALUES ({', '.join(values.values())})"


def wrong(table: str, **changes: str) -> Trial:
    return Trial(table, [row(table, changes)])


def twice(table: str, named: str | None = None, **changes: str) -> Trial:
    """Return the same row again, except for what other keys would refuse."""
    return Trial(table, [row(table), row(table, changes)], named=named)


def then(table: str, *statements: str) -> Trial:
    return Trial(table, [row(table), *statements])


def effect(table: str, statement: str, question: str) -> Trial:
    return Trial(table, [statement], question)


def below_zero(table: str, column: str, beside: str | None) -> Trial:
    """Change another account as well, to keep the identity."""
    return wrong(table, **{column: "-1"}, **({beside: "1"} if beside else {}))


# A period is closed as the coordinator does; December is open.
CLOSE = """
UPDATE period SET state = 'closed', close_requested_at = now(), close_requested_by = 'x', closed_at = now(),
    position = 0, transfers = 0, root = '' WHERE id = '{}'
"""
CLOSED, DECEMBER = CLOSE.format("2026-11"), row("period")
THERE = {
    "pool": [row("pool", {"period": "'2026-12'"})],
    "lease": [row("pool", {"quota": "'q'", "period": "'2026-12'"}), row("lease", {"period": "'2026-12'"})],
    "correction": [row("pool", {"quota": "'q'", "period": "'2026-12'"}), row("correction", {"period": "'2026-12'"})],
}


def of_a_closed_period(table: str) -> dict[str, Trial]:
    """Move a row from one period to another; it leaves one and enters the other, so each of the two is tried alone."""
    elsewhere = "quota = 'p'" if table == "pool" else "quota = 'q'"
    away = [DECEMBER, *THERE[table][:-1], row(table)]
    return {
        f"{table}_is_not_added_to_a_closed_period": Trial(table, [CLOSED, row(table)]),
        f"{table}_is_not_changed_in_a_closed_period": Trial(
            table, [*away, CLOSED, f"UPDATE {table} SET period = '2026-12' WHERE {elsewhere}"]
        ),
        f"{table}_is_not_moved_to_a_closed_period": Trial(
            table, [DECEMBER, *THERE[table], CLOSED, f"UPDATE {table} SET period = '2026-11' WHERE {elsewhere}"]
        ),
        f"{table}_is_not_deleted_from_a_closed_period": Trial(
            table, [row(table), CLOSED, f"DELETE FROM {table} WHERE {elsewhere}"]
        ),
    }


POOL_SOURCES = ("overage", "funded", "suspense_carried_in", "correction")
POOL_PLACES = (
    *("outstanding", "unallocated", "suspense", "suspense_carried", "suspense_carried_out"),
    *("estimated", "consumed", "written_off"),
)
LEASE_SOURCES = ("overage", "granted")
LEASE_PLACES = ("consumed", "returned", "outstanding", "suspense", "suspense_carried_out", "estimated", "written_off")
CORRECTION_SOURCES = ("correction", "suspense_carried_in")
CORRECTION_PLACES = ("suspense_carried", "suspense_carried_out", "estimated", "consumed", "written_off")
CORRECTION_OTHERS = ("replaced", "recovered", "region_consumed", "region_returned")
LEASE_OTHERS = ("region_consumed", "region_returned", "demand_milli", "waiting", "last_grant")


def accounts(table: str, *sides: Sequence[str]) -> dict[str, Trial]:
    return {
        f"{table}_{column}_check": below_zero(table, column, side[1] if column == side[0] else side[0])
        for side in sides
        for column in side
    }


AGENT = "INSERT INTO region_agent VALUES ('{}', 'agent-1', '0.1.0', '{{}}', now())"
INSTALLED = f"'{'1' * 32}', '7', 16384, '{{here}}', now()"
TRIALS: dict[str, Trial] = {
    # one row that is wrong
    "audit_action_is_named": wrong("audit", action="'Anything'"),
    "audit_has_an_actor": wrong("audit", actor="''"),
    "lane_lane_check": wrong("lane", lane="-1"),
    "lane_last_seq_check": wrong("lane", last_seq="-1"),
    "lease_balances": wrong("lease", granted="1"),
    **accounts("lease", LEASE_SOURCES, LEASE_PLACES),
    **{f"lease_{column}_check": below_zero("lease", column, None) for column in LEASE_OTHERS},
    "lease_state_check": wrong("lease", state="'open'"),
    "lease_overdraft_is_not_negative": wrong("lease", overdrawn="-1"),
    "period_has_a_length": wrong("period", ends_at="'2026-12-01'"),
    "period_kind_check": wrong("period", kind="'year'"),
    "period_names_a_table": wrong("period", id="'2026/12'"),
    "period_state_check": wrong("period", state="'ajar'", close_requested_at="now()", close_requested_by="'x'"),
    "period_close_is_requested": wrong("period", state="'closing'"),
    "period_is_closed_whole": wrong("period", state="'closed'", close_requested_at="now()", close_requested_by="'x'"),
    "correction_balances": wrong("correction", suspense_carried_in="1"),
    "correction_is_of_another_period": wrong("correction", charge_period="'2026-11'"),
    **accounts("correction", CORRECTION_SOURCES, CORRECTION_PLACES),
    **{f"correction_{column}_check": below_zero("correction", column, None) for column in CORRECTION_OTHERS},
    "policy_version_only_row_check": Trial(
        "policy_version", ["INSERT INTO policy_version (only_row, version) VALUES (false, 1)"]
    ),
    "pool_balances": wrong("pool", funded="1"),
    **accounts("pool", POOL_SOURCES, POOL_PLACES),
    "pool_funded_check": wrong("pool", funded="-1", adjustment="1", credited="1"),
    "region_name_check": wrong("region", name="'Not a name'"),
    "region_status_check": wrong("region", status="'asleep'"),
    "region_weight_check": wrong("region", weight="-1"),
    "region_has_a_hold_key": wrong("region", hold_key="NULL"),
    "region_setting_weight_check": wrong("region_setting", weight="-1"),
    "region_setting_is_not_empty": wrong("region_setting", weight="NULL"),
    "rebalance_mode_check": wrong("rebalance", mode="'forget'"),
    "rebalance_recalled_check": wrong("rebalance", recalled="-1"),
    "rebalance_state_check": wrong("rebalance", state="'asleep'", ended_at="now()"),
    "rebalance_has_an_end": wrong("rebalance", ended_at="now()"),
    "rebalance_move_number_check": wrong("rebalance_move", number="0"),
    "rebalance_move_units_check": wrong("rebalance_move", units="0"),
    "rebalance_move_regranted_check": wrong("rebalance_move", regranted="-1"),
    "rebalance_move_returns_its_units": wrong("rebalance_move", returned="2"),
    "rebalance_move_regrants_returns": wrong("rebalance_move", regranted="1"),
    "floor_hold_units_check": wrong("floor_hold", units="0"),
    "rebalance_move_has_another_target": wrong("rebalance_move", target="'r'"),
    "region_epoch_lanes_check": wrong("region_epoch", lanes="65"),
    "region_epoch_state_check": wrong("region_epoch", state="'lost'"),
    "report_lines_check": wrong("report", lines="-1"),
    "report_seq_check": wrong("report", seq="0"),
    "seal_number_check": wrong("seal", number="0"),
    **{
        f"seal_{column}_check": wrong("seal", **{column: "-1"})
        for column in ("position", "transfer", "audit", "reports", "movements", "entries")
    },
    "subscription_tenant_check": wrong("subscription", tenant="''"),
    "identity_issuer_check": wrong("identity", issuer="''"),
    "identity_subject_check": wrong("identity", subject="''"),
    "token_scopes_check": wrong("token", scopes="'{}'"),
    "transfer_src_is_known": wrong("transfer", src="'nowhere'"),
    "transfer_dst_is_known": wrong("transfer", dst="'nowhere'"),
    "transfer_has_one_origin": wrong("transfer", movement_id="gen_random_uuid()"),
    "transfer_has_two_sides": wrong("transfer", dst="'outstanding'"),
    "transfer_units_are_positive": wrong("transfer", units="0", dst="'suspense'"),
    "transfer_of_report_is_named": wrong("transfer", line="NULL"),
    "transfer_of_usage_is_placed": Trial(
        "transfer", ["DROP TRIGGER transfer_is_rolled_up ON transfer", row("transfer", {"window_at": "NULL"})]
    ),
    "limit_override_reason_check": wrong("limit_override", reason="''"),
    "limit_override_has_a_length": wrong("limit_override", valid_until="now()"),
    "block_field_check": wrong("block", field="'route'"),
    "block_value_check": wrong("block", value="''"),
    "block_reason_check": wrong("block", reason="''"),
    "reset_keys_check": wrong("reset", keys="'{}'"),
    "reset_number_check": wrong("reset", number="0"),
    "reset_reason_check": wrong("reset", reason="''"),
    "measurement_only_row_check": Trial(
        "measurement", ["INSERT INTO measurement (only_row, figures, measured_at) VALUES (false, '{}', now())"]
    ),
    "region_last_seen_pkey": Trial(
        "region_last_seen", [row("region"), *["INSERT INTO region_last_seen VALUES ('r', now())"] * 2]
    ),
    "region_last_seen_region_fkey": Trial(
        "region_last_seen", ["INSERT INTO region_last_seen VALUES ('nowhere', now())"]
    ),
    "region_identity_is_short": wrong("region_identity", identity="repeat('x', 1001)"),
    "region_identity_pkey": twice("region_identity"),
    "region_identity_region_fkey": wrong("region_identity", region="'nowhere'"),
    "region_agent_pkey": Trial("region_agent", [row("region"), *[AGENT.format("r")] * 2]),
    "region_agent_region_fkey": Trial("region_agent", [AGENT.format("nowhere")]),
    "installation_only_row_check": Trial("installation", [f"INSERT INTO installation VALUES (false, {INSTALLED})"]),
    "installation_pkey": Trial("installation", [f"INSERT INTO installation VALUES (true, {INSTALLED})"] * 2),
    "measurement_pkey": Trial("measurement", ["INSERT INTO measurement VALUES (true, '{}', now())"] * 2),
    "decision_has_an_outcome": wrong("decision", outcome="'perhaps'"),
    "decision_counts": wrong("decision", times="0"),
    "decision_counts.weight": wrong("decision", weight="0.5"),
    "decision_pkey": twice("decision", "decision_2026-11-18_pkey"),
    "decision_hash_key_only_row_check": Trial(
        "decision_hash_key", [f"INSERT INTO decision_hash_key VALUES (false, '{'k' * 32}')"]
    ),
    "decision_hash_key_pkey": Trial(
        "decision_hash_key", [f"INSERT INTO decision_hash_key VALUES (true, '{'k' * 32}')"]
    ),
    "decision_hash_key_key_check": Trial("decision_hash_key", ["UPDATE decision_hash_key SET key = ''"]),
    "block_version_only_row_check": Trial(
        "block_version", ["INSERT INTO block_version (only_row, version) VALUES (false, 1)"]
    ),
    "webhook_url_check": wrong("webhook", url="'file:///x'"),
    "webhook_events_check": wrong("webhook", events="'{}'"),
    "webhook_secret_check": wrong("webhook", secret="''"),
    "webhook_rotates_whole": wrong("webhook", previous_secret="'x'"),
    "outbox_kind_check": wrong("outbox", kind="'x'"),
    "delivery_attempts_check": wrong("delivery", attempts="-1"),
    "delivery_ends_once": wrong("delivery", delivered_at="now()", dead_at="now()"),
    "adjustment_kind_check": wrong("adjustment", kind="'forget'"),
    "adjustment_units_check": wrong("adjustment", units="0"),
    "adjustment_reason_check": wrong("adjustment", reason="''"),
    "adjustment_document_check": wrong("adjustment", document="''"),
    "adjustment_has_two_people": wrong("adjustment", **BOOKED | {"approved_by": f"'{'1' * 32}'"}),
    "adjustment_is_approved_whole": wrong("adjustment", **APPROVED),
    "adjustment_is_withdrawn_whole": wrong("adjustment", withdrawn_at="now()"),
    "adjustment_ends_once": wrong("adjustment", **BOOKED, **WITHDRAWN),
    "adjustment_is_approved_in_time": wrong("adjustment", **BOOKED, expires_at="'2026-11-01'"),
    "pool_credits_are_adjustments": wrong("pool", credited="1"),
    "pool_carry_over_is_not_negative": wrong("pool", carried_over_in="-1", adjustment="1", credited="1"),
    "pool_soft_cap_extension_check": wrong("pool", soft_cap_extension="-1", adjustment="1", credited="1"),
    "pool_overage_was_consumed": wrong("pool", overage_used="1"),
    "correction_overage_was_consumed": wrong("correction", overage_used="1"),
    "pool_entitlement_is_not_negative": wrong("pool", credited="-1"),
    "resolution_kind_check": Trial("resolution", [row("lease"), row("resolution", OF_A_LEASE | {"kind": "'forget'"})]),
    "resolution_suspense_check": Trial(
        "resolution",
        ["ALTER TABLE resolution DROP CONSTRAINT resolution_charge_is_suspense", row("resolution", {"suspense": "-1"})],
    ),
    "resolution_charge_is_suspense": wrong("resolution", charged="1"),
    "resolution_is_approved_whole": wrong("resolution", approved_at="now()"),
    "resolution_reason_check": wrong("resolution", reason="''"),
    "resolution_has_two_people": wrong("resolution", approved_by=f"'{'1' * 32}'", approved_at="now()"),
    "resolution_is_of_a_lease_or_a_lane": wrong("resolution", seq="NULL"),
    "region_epoch_retired": wrong("region_epoch", state="'retired'"),
    "export_format_is_known": wrong("export", format="'xls'"),
    "export_is_finished_whole": wrong("export", finished_at="now()"),
    "export_period_fkey": wrong("export", period="'2026-10'"),
    "export_part_export_fkey": wrong("export_part", export=f"'{'2' * 32}'"),
    "export_part_offset_is_not_negative": wrong("export_part", starts_at="-1"),
    "export_part_has_bytes": wrong("export_part", body="''"),
    "verification_is_finished_whole": wrong("verification", finished_at="now()"),
    "usage_hour_units_are_positive": wrong("usage_hour", units="0"),
    "usage_day_units_are_positive": wrong("usage_day", units="0"),
    "labelled_usage_units_are_positive": wrong("labelled_usage", units="0"),
    # a row without a parent
    "correction_epoch_fkey": wrong("correction", epoch="99"),
    "correction_quota_period_fkey": wrong("correction", quota="'nothing'"),
    "correction_region_fkey": wrong("correction", region="'nowhere'"),
    "lane_epoch_fkey": wrong("lane", epoch="99"),
    "lease_epoch_fkey": wrong("lease", epoch="99"),
    "lease_quota_period_fkey": wrong("lease", quota="'nothing'"),
    "lease_region_fkey": wrong("lease", region="'nowhere'"),
    "pool_period_fkey": wrong("pool", period="'2026-10'"),
    "rebalance_region_fkey": wrong("rebalance", region="'nowhere'"),
    "rebalance_move_rebalance_fkey": wrong("rebalance_move", rebalance=f"'{'9' * 32}'"),
    "rebalance_move_quota_period_fkey": wrong("rebalance_move", quota="'nothing'"),
    "rebalance_move_source_fkey": wrong("rebalance_move", source="'nowhere'"),
    "rebalance_move_target_fkey": wrong("rebalance_move", target="'nowhere'"),
    "floor_hold_quota_period_fkey": wrong("floor_hold", quota="'nothing'"),
    "floor_hold_rebalance_fkey": wrong("floor_hold", rebalance=f"'{'9' * 32}'"),
    "floor_hold_region_fkey": wrong("floor_hold", region="'nowhere'"),
    "region_setting_region_fkey": wrong("region_setting", region="'nowhere'"),
    "region_epoch_region_fkey": wrong("region_epoch", region="'nowhere'"),
    "delivery_event_fkey": wrong("delivery", event=f"'{'9' * 32}'"),
    "delivery_webhook_fkey": wrong("delivery", webhook=f"'{'9' * 32}'"),
    "adjustment_quota_booked_in_fkey": wrong("adjustment", **BOOKED, quota="'nothing'"),
    "resolution_of_an_epoch": wrong("resolution", **OF_A_LEASE, epoch="99"),
    "resolution_of_a_lane": wrong("resolution", lane="9"),
    "report_epoch_lane_fkey": wrong("report", lane="9"),
    # the same row twice
    "webhook_pkey": twice("webhook"),
    "outbox_pkey": twice("outbox"),
    "delivery_pkey": twice("delivery"),
    "adjustment_pkey": twice("adjustment"),
    "alembic_version_pkc": twice("alembic_version"),
    "audit_pkey": twice("audit"),
    "block_pkey": twice("block"),
    "reset_pkey": twice("reset"),
    "block_version_pkey": Trial("block_version", ["INSERT INTO block_version (version) VALUES (1)"]),
    "idempotency_record_pkey": twice("idempotency_record"),
    "limit_override_pkey": twice("limit_override"),
    "correction_pkey": twice("correction"),
    "lane_pkey": twice("lane"),
    "lease_pkey": twice("lease"),
    "limits_version_pkey": twice("limits_version"),
    "period_pkey": Trial("period", ["SET LOCAL session_replication_role = replica", *[row("period")] * 2]),
    "policy_version_pkey": Trial("policy_version", ["INSERT INTO policy_version (version) VALUES (1)"]),
    "pool_pkey": twice("pool"),
    "quarantine_pkey": twice("quarantine"),
    "region_pkey": twice("region"),
    "region_setting_pkey": twice("region_setting"),
    "rebalance_pkey": twice("rebalance", version="3", region="NULL"),
    "rebalance_version_key": twice("rebalance", id=f"'{'2' * 32}'", region="NULL"),
    "rebalance_of_region": twice("rebalance", id=f"'{'2' * 32}'", version="3"),
    "floor_hold_pkey": twice("floor_hold"),
    "rebalance_move_pkey": twice("rebalance_move"),
    "shared_limit_pkey": twice("shared_limit"),
    "region_epoch_pkey": twice("region_epoch", nonce="'k'"),
    "region_epoch_nonce_key": twice("region_epoch", epoch="3"),
    "region_epoch_current_of_cell": wrong("region_epoch", state="'current'"),
    "region_epoch_of_a_cell": wrong("region_epoch", cell="1"),
    "report_pkey": twice("report", position="8"),
    "report_position_key": twice("report", seq="2"),
    "resolution_pkey": Trial("resolution", [row("resolution", APPROVED), row("resolution")]),
    "resolution_open": twice("resolution", **ANOTHER),
    "job_pkey": twice("job"),
    "seal_pkey": twice("seal", sealed_at="now()", hash="'y'"),
    "seal_sealed_at_key": twice("seal", number="2", hash="'y'"),
    "seal_hash_key": twice("seal", number="2", sealed_at="now()"),
    "subscription_pkey": twice("subscription"),
    "export_pkey": twice("export"),
    "export_part_pkey": twice("export_part"),
    "verification_pkey": twice("verification"),
    "identity_pkey": Trial(
        "identity",
        [row("identity", {"id": f"'{'0' * 32}'"}), row("identity", {"id": f"'{'0' * 32}'", "subject": "'t'"})],
    ),
    "identity_is_one_person": twice("identity"),
    "token_pkey": Trial(
        "token", [row("token", {"id": f"'{'0' * 32}'"}), row("token", {"id": f"'{'0' * 32}'", "hash": "'y'"})]
    ),
    "token_hash_key": twice("token"),
    "transfer_pkey": twice("transfer", "transfer_2026-11_pkey", seq="2"),
    "transfer_of_report": twice("transfer", "transfer_2026-11_epoch_lane_seq_line_part_period_key", id="2"),
    "transfer_of_movement": Trial(
        "transfer",
        [row("transfer", {"seq": "NULL", "movement_id": f"'{'0' * 32}'", "id": number}) for number in ("1", "2")],
        named="transfer_2026-11_movement_id_part_period_idx",
    ),
    "tenant_id_check": wrong("tenant", id="''"),
    "tenant_pkey": twice("tenant"),
    "archive_pkey": twice("archive"),
    "archive_period_fkey": wrong("archive", period="'2026-12'"),
    "archive_is_recorded_whole": wrong("archive", archived_at="now()"),
    "archived_sum_pkey": twice("archived_sum"),
    "archived_sum_period_fkey": wrong("archived_sum", period="'2026-12'"),
    "archived_sum_units_are_positive": wrong("archived_sum", units="0"),
    "archived_sum_has_transfers": wrong("archived_sum", transfers="0"),
    "usage_hour_row_is_unique": twice("usage_hour"),
    "usage_day_row_is_unique": twice("usage_day"),
    "labelled_usage_row_is_unique": twice("labelled_usage"),
    "label_set_pkey": twice("label_set"),
    # triggers: the ledger is append-only, in every table
    **{
        f"{table}_is_append_only.{verb}": then(table, statement)
        for table in ("transfer", "report", "audit")
        for verb, statement in (
            ("update", f"UPDATE {table} SET recorded_at = now()"),
            ("delete", f"DELETE FROM {table}"),
        )
    },
    "seal_is_append_only.update": then("seal", "UPDATE seal SET position = 9"),
    "seal_is_append_only.delete": then("seal", "DELETE FROM seal"),
    "transfer_is_append_only.partition": then("transfer", 'DELETE FROM "transfer_2026-11"'),
    "archived_sum_is_append_only.update": then("archived_sum", "UPDATE archived_sum SET units = 4"),
    "archived_sum_is_append_only.delete": then("archived_sum", "DELETE FROM archived_sum"),
    "archive_stands_once_recorded.update": Trial("archive", [row("archive", ARCHIVED), "UPDATE archive SET rows = 1"]),
    "archive_stands_once_recorded.delete": Trial("archive", [row("archive", ARCHIVED), "DELETE FROM archive"]),
    **{
        f"{table}_is_never_truncated": then(table, f"TRUNCATE {table}")
        for table in ("report", "audit", "seal", "archive", "archived_sum")
    },
    "transfer_is_never_truncated": Trial(
        "transfer", ['DROP TRIGGER transfer_is_never_truncated ON "transfer_2026-11"', "TRUNCATE transfer"]
    ),
    # triggers that replace a foreign key, at lower cost
    "transfer_has_a_pool": wrong("transfer", quota="'nothing'"),
    "pool_of_transfers_stays.update": Trial(
        "pool", [row("pool"), row("transfer", {"quota": "'p'"}), "UPDATE pool SET quota = 'r' WHERE quota = 'p'"]
    ),
    "pool_of_transfers_stays.delete": Trial(
        "pool", [row("pool"), row("transfer", {"quota": "'p'"}), "DELETE FROM pool WHERE quota = 'p'"]
    ),
    "pool_is_never_truncated": Trial(
        "pool", ["DROP TRIGGER adjustment_is_never_truncated ON adjustment", "TRUNCATE pool CASCADE"]
    ),
    # triggers: an approved decision has moved units
    "adjustment_stands_once_ended.update": Trial(
        "adjustment", [row("adjustment", BOOKED), "UPDATE adjustment SET units = 2"]
    ),
    "adjustment_stands_once_ended.delete": Trial(
        "adjustment", [row("adjustment", WITHDRAWN), "DELETE FROM adjustment"]
    ),
    "adjustment_is_never_truncated": then("adjustment", "TRUNCATE adjustment"),
    "resolution_stands_once_approved.update": Trial(
        "resolution", [row("resolution", APPROVED), "UPDATE resolution SET reason = 'y'"]
    ),
    "resolution_stands_once_approved.delete": Trial(
        "resolution", [row("resolution", APPROVED), "DELETE FROM resolution"]
    ),
    "resolution_is_never_truncated": then("resolution", "TRUNCATE resolution"),
    # triggers: a closed period is final
    **{name: trial for table in THERE for name, trial in of_a_closed_period(table).items()},
    "period_closes_its_partition": Trial("period", [CLOSED, row("transfer")]),
    "period_stays_closed.update": then("period", CLOSE.format("2026-12"), "UPDATE period SET root = 'x'"),
    "period_stays_closed.delete": then("period", CLOSE.format("2026-12"), "DELETE FROM period WHERE id = '2026-12'"),
    "period_never_opens_again": Trial(
        "period",
        [
            row("period", {"state": "'closing'", "close_requested_at": "now()", "close_requested_by": "'x'"}),
            "UPDATE period SET state = 'open' WHERE id = '2026-12'",
        ],
    ),
    # triggers with side effects
    **{
        f"{table}_passes_the_gate": effect(
            table,
            row(table),
            "SELECT count(*) = 1 FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'position_gate'::regclass "
            "AND mode = 'RowShareLock'",
        )
        for table in ("transfer", "report", "audit")
    },
    "period_has_a_partition": effect(
        "period", row("period"), """SELECT to_regclass('"transfer_2026-12"') IS NOT NULL"""
    ),
    "transfer_is_rolled_up": effect(
        "transfer",
        row("transfer"),
        "SELECT (SELECT sum(units) FROM usage_hour) + (SELECT sum(units) FROM usage_day) = 6",
    ),
    "transfer_is_rolled_up_by_labels": effect(
        "transfer",
        row("transfer", {"dimensions": """'{"labels": "model=large"}'"""}),
        "SELECT sum(units) = 3 FROM labelled_usage WHERE labels = 'model=large'",
    ),
}


@pytest.fixture
async def owner(database: str) -> AsyncIterator[Connection]:
    owner: Connection = await asyncpg.connect(database)
    try:
        await owner.execute(PARENTS)
        yield owner
    finally:
        await owner.close()


async def try_(owner: Connection, trial: Trial) -> str | None:
    """Return None if all statements succeeded, or what refused the last one."""
    for statement in trial.statements[:-1]:
        await owner.execute(statement)
    try:
        await owner.execute(trial.statements[-1])
    except asyncpg.PostgresError as error:
        return getattr(error, "constraint_name", None) or str(error)
    if trial.question is not None and await owner.fetchval(trial.question):
        return "the answer is yes"
    return None


async def outcome(owner: Connection, trial: Trial, *before: str) -> str | None:
    """Run a trial that is rolled back."""
    transaction = owner.transaction()
    await transaction.start()
    try:
        for statement in before:
            await owner.execute(statement)
        return await try_(owner, trial)
    finally:
        await transaction.rollback()


def guard_of(name: str) -> str:
    return name.partition(".")[0]


async def test_a_valid_row_is_accepted(owner: Connection) -> None:
    for table in ROWS:
        assert await outcome(owner, Trial(table, [row(table)])) is None, table


async def test_each_guard_refuses_its_trial(owner: Connection) -> None:
    found = {name: await outcome(owner, trial) for name, trial in TRIALS.items()}
    assert {name: said for name, said in found.items() if not is_by(name, TRIALS[name], said)} == {}


def is_by(name: str, trial: Trial, said: str | None) -> bool:
    if said is None:
        return False
    if trial.question is not None:
        return said == "the answer is yes"
    return said == (trial.named or guard_of(name)) or any(words in said for words in _SAID_BY_TRIGGERS)


_SAID_BY_TRIGGERS = ("append-only", "no pool:", "is closed:", "is closing:", "is approved:", "has ended:")


async def test_without_its_guard_each_trial_succeeds(owner: Connection) -> None:
    """Otherwise the trial proves nothing, because something else refuses it."""
    kinds = {row["name"]: row["kind"] for row in await owner.fetch(GUARDS)}
    drops = {"constraint": "ALTER TABLE {1} DROP CONSTRAINT {0} CASCADE", "trigger": "DROP TRIGGER {0} ON {1}"}
    drops["index"] = "DROP INDEX {0}"
    still = {
        name: await outcome(owner, trial, drops[kinds[guard_of(name)]].format(guard_of(name), trial.table))
        for name, trial in TRIALS.items()
    }
    assert {name: said for name, said in still.items() if said is not None} == {}


async def test_there_is_no_guard_without_a_trial(owner: Connection) -> None:
    there = {row["name"] for row in await owner.fetch(GUARDS)}
    tried = set(map(guard_of, TRIALS))
    assert there == tried


async def test_only_these_columns_may_be_null(owner: Connection) -> None:
    """A column that may be NULL satisfies every CHECK on it."""
    found = {row["of"]: set(row["columns"]) for row in await owner.fetch(NULLABLE_COLUMNS)}
    assert found == MAY_BE_MISSING


MAY_BE_MISSING = {
    "archive": {"archived_at", "failure", "first_position", "folder", "last_position", "last_transfer", "location"}
    | {"manifest_sha256", "transfers", "usage_sha256"},
    "decision": {"mode", "reason", "policy", "name", "quota", "cost", "limit_units", "share", "remaining"}
    | {"retry_after_ms", "degraded", "epoch", "latency_us", "operation", "last_at", "subject", "others"},
    "delivery": {"dead_at", "delivered_at", "error", "status"},
    "outbox": {"traceparent"},
    "webhook": {"previous_secret", "previous_until"},
    "adjustment": {"approved_at", "approved_by", "booked_in", "withdrawn_at", "withdrawn_by"},
    "audit": {"request_id"},
    "block": {"valid_until"},
    "export": {"cancelled_at", "finished_at", "expires_at", "resume_points", "rows_expected", "sha256", "tenant"},
    "idempotency_record": {"body", "headers", "status"},
    "lane": {"last_hash"},
    "limit_override": {"valid_until"},
    "period": {"calendar", "closed_at", "close_requested_at", "close_requested_by", "position", "root", "transfers"},
    "pool": {"tenant"},
    "rebalance": {"ended_at", "reason", "region"},
    "rebalance_move": {"ended_at", "reason", "target"},
    "region": {"hold_key"},  # required by a CHECK
    "region_setting": {"ceiling", "floor", "weight"},
    "region_epoch": {"fenced_at", "retired_at", "retired_because", "retired_by"},
    "resolution": {"approved_at", "approved_by", "bulk", "lane", "period", "quota", "seq"},
    "token": {"revoked_at"},
    "transfer": {"dimensions", "epoch", "lane", "line", "movement_id", "region", "reverses", "seq", "window_at"},
    "usage_day": {"api_key", "counted_as", "degraded", "policy", "route_class", "tenant"},
    "labelled_usage": {"api_key", "counted_as", "degraded", "policy", "route_class", "tenant"},
    "usage_hour": {"api_key", "counted_as", "degraded", "policy", "route_class", "tenant"},
    "verification": {"finished_at", "result"},
}


async def test_every_partition_has_all_guards_of_the_whole(owner: Connection) -> None:
    await owner.execute(row("period", {"id": "'2026-12-01T09'", "kind": "'hour'"}))
    for partition in ("transfer_2026-11", "transfer_2026-12-01T09"):
        assert await owner.fetch(GUARDS_OF_TABLE, "transfer") == await owner.fetch(GUARDS_OF_TABLE, partition)
        for statement in (f'TRUNCATE "{partition}"', 'TRUNCATE "period" CASCADE'):
            with pytest.raises(asyncpg.RaiseError, match="append-only"):
                await owner.execute(statement)


# --- privileges -------------------------------------------------------------------------------------------------------

# Privileges of the coordinator: r(ead), a(dd), d(elete), and w(rite) for some of the columns. It has no others.
MAY = {
    "adjustment": "arw",
    "delivery": "arw",
    "outbox": "adr",
    "webhook": "adrw",
    "alembic_version": "r",
    "audit": "ar",
    "block": "adrw",
    "block_version": "rw",
    "reset": "adr",
    "export": "arw",
    "export_part": "adr",
    "idempotency_record": "adrw",
    "correction": "arw",
    "job": "arw",
    "lane": "arw",
    "lease": "arw",
    "limit_override": "adr",
    "limits_version": "ar",
    "period": "arw",
    "policy_version": "rw",
    "measurement": "arw",
    "installation": "arw",
    "region_last_seen": "arw",
    "region_agent": "adrw",
    "region_identity": "adr",
    "pool": "arw",
    "position_gate": "rW",  # has no columns and no rows: the right to lock it
    "quarantine": "ar",
    "identity": "arw",
    "shared_limit": "adrw",
    "rebalance": "arw",
    "floor_hold": "adr",
    "rebalance_move": "arw",
    "region": "arw",
    "region_epoch": "arw",
    "decision": "ar",
    "decision_hash_key": "r",
    "region_setting": "adrw",
    "report": "ar",
    "resolution": "arw",
    "seal": "ar",
    "subscription": "adrw",
    "token": "r",
    "transfer": "ar",
    "usage_day": "r",
    "labelled_usage": "r",
    "label_set": "ar",
    "usage_hour": "r",
    "verification": "arw",
    "archive": "arw",
    "archived_sum": "r",
    "tenant": "adrw",
}
# The columns that identify a row and can never be changed.
FIXED = {
    "delivery": {"event", "webhook"},
    "outbox": {"id", "kind", "data", "occurred_at", "traceparent"},
    "webhook": {"id", "url", "events", "created_at", "created_by"},
    "adjustment": {"id", "quota", "period", "kind", "units", "reason", "document", "proposed_by", "proposed_at"}
    | {"expires_at"},
    "lane": {"epoch", "lane"},
    "lease": {"epoch", "quota", "period", "region"},
    "period": {"id", "kind", "calendar", "starts_at", "ends_at"},
    "pool": {"quota", "period", "name", "tenant"},
    "rebalance": {"id", "version", "mode", "request", "plan", "region", "recalled", "created_at", "created_by"},
    "rebalance_move": {"rebalance", "number", "quota", "period", "source", "target", "units"},
    "region": {"name", "created_at", "hold_key"},
    "shared_limit": {"quota"},
    "region_setting": {"key", "region"},
    "region_epoch": {"epoch", "region", "nonce", "lanes", "opened_at", "cell", "cells"},
    "subscription": {"tenant", "began_at"},
    "block": {"field", "value"},
    "block_version": {"only_row"},
    "idempotency_record": {"caller", "key"},
    "policy_version": {"only_row"},
    "measurement": {"only_row"},
    "installation": {"only_row"},
    "region_last_seen": {"region"},
    "region_agent": {"region", "agent"},
    "job": {"name"},
    "verification": {"id", "requested_by", "requested_at", "kept_seals"},
    "export": {"id", "period", "tenant", "format", "seal", "is_final", "requested_by", "requested_at"},
    "resolution": {"epoch", "lane", "quota", "period"},
    "correction": {"epoch", "quota", "charge_period", "period", "region"},
}


async def test_the_coordinator_has_exactly_these_privileges(owner: Connection) -> None:
    found = {row["name"]: row["may"] for row in await owner.fetch(PRIVILEGES, COORDINATOR) if row["may"]}
    assert found == MAY
    fixed = await owner.fetch(FIXED_COLUMNS, COORDINATOR, list(FIXED))
    assert {row["name"]: set(row["columns"]) for row in fixed} == FIXED
    assert not await owner.fetchval("SELECT has_schema_privilege($1, current_schema(), 'CREATE')", COORDINATOR)
    assert not await owner.fetchval(
        "SELECT rolcanlogin OR rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = $1", COORDINATOR
    )


GUARDS = """
SELECT conname AS name, 'constraint' AS kind, relname AS of FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid
WHERE connamespace = current_schema()::regnamespace AND contype <> 'n' AND NOT relispartition
UNION ALL
SELECT tgname, 'trigger', relname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
WHERE NOT tgisinternal AND NOT relispartition
UNION ALL
SELECT key.relname, 'index', pg_class.relname FROM pg_index
JOIN pg_class key ON key.oid = indexrelid JOIN pg_class ON pg_class.oid = indrelid
WHERE indisunique AND key.relnamespace = current_schema()::regnamespace AND NOT pg_class.relispartition
    AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)
"""
NULLABLE_COLUMNS = """
SELECT relname AS of, array_agg(attname::text ORDER BY attname) AS columns
FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
    AND attnum > 0 AND NOT attisdropped AND NOT attnotnull
GROUP BY relname
"""
# What fires once for a statement on the whole is not repeated on a part, and nobody may name a part to insert into it.
GUARDS_OF_TABLE = """
SELECT pg_get_constraintdef(oid) AS guard FROM pg_constraint
WHERE conrelid = to_regclass(quote_ident($1)) AND contype <> 'n'
UNION ALL
SELECT tgname || tgtype FROM pg_trigger
WHERE tgrelid = to_regclass(quote_ident($1)) AND NOT tgisinternal AND tgtype & 4 = 0
ORDER BY guard
"""
PRIVILEGES = """
SELECT relname AS name, concat(
    CASE WHEN has_table_privilege($1, oid, 'INSERT') THEN 'a' END,
    CASE WHEN has_table_privilege($1, oid, 'DELETE') THEN 'd' END,
    CASE WHEN has_table_privilege($1, oid, 'SELECT') THEN 'r' END,
    CASE WHEN has_table_privilege($1, oid, 'UPDATE') THEN 'W'
         WHEN has_any_column_privilege($1, oid, 'UPDATE') THEN 'w' END,
    CASE WHEN has_table_privilege($1, oid, 'TRUNCATE, REFERENCES, TRIGGER') THEN '!' END) AS may
FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v', 'm')
"""
FIXED_COLUMNS = """
SELECT relname AS name, array_agg(attname::text) AS columns FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
WHERE relnamespace = current_schema()::regnamespace AND relname = ANY ($2) AND attnum > 0 AND NOT attisdropped
    AND NOT has_column_privilege($1, pg_class.oid, attnum, 'UPDATE')
GROUP BY relname
"""
