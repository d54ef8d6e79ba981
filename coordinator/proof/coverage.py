"""List what proves each table of the database, or why it needs no proof; docs/guides/auditing.md has it for auditors.

A test compares this list with the tables and columns of the schema, so that a new table cannot be forgotten: name here
what proves it and extend `verify`, or say why it needs no proof.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class ProvenBy(StrEnum):
    CHAINS = "chains"  # each report's hash includes its transfers and the previous report of its lane
    SEALS = "seals"  # the seals include a hash of it
    TRANSFERS = "transfers"  # it is computed again as the sum of its transfers
    AUDIT = "audit"  # the sealed audit has an entry for each change (verify_audited.py)
    KEYS = "keys"  # it follows from the row's own key


class Proven(NamedTuple):
    by: tuple[ProvenBy, ...]
    but_not: Mapping[str, str] = {}  # columns that are not proven, with the reason


class NotProven(NamedTuple):
    because: str


_STEERS = "it steers how units are divided, and moves none"
_REGIONS_OWN = "a region's own total: the reconciliation compares it with the ledger"
_HOPE = "it says how long the lease lasts and moves nothing"
_QUARANTINES = "it says who may still be granted units"

COVERAGE: Mapping[str, Proven | NotProven] = {
    "report": Proven((ProvenBy.CHAINS, ProvenBy.SEALS)),
    "lane": Proven((ProvenBy.CHAINS,)),
    "transfer": Proven(
        (ProvenBy.CHAINS, ProvenBy.SEALS), {"id": "of a report's transfer it is a row number, on which nothing depends"}
    ),
    "seal": Proven((ProvenBy.SEALS,)),
    "audit": Proven((ProvenBy.SEALS,)),
    "pool": Proven((ProvenBy.TRANSFERS, ProvenBy.KEYS), {"open_moves": _STEERS}),
    "lease": Proven(
        (ProvenBy.TRANSFERS, ProvenBy.KEYS),
        {
            "state": _QUARANTINES,
            "region_consumed": _REGIONS_OWN,
            "region_returned": _REGIONS_OWN,
            "demand_milli": _STEERS,
            "waiting": _STEERS,
            "last_grant": _STEERS,
            "overdraft": _STEERS,
            "overdrawn": "so much a region says it spent while it was cut off: what it reported is in the transfers",
            "reported_at": _HOPE,
            "expires_at": _HOPE,
        },
    ),
    "correction": Proven(
        (ProvenBy.TRANSFERS, ProvenBy.KEYS),
        {
            "region_consumed": _REGIONS_OWN,
            "region_returned": _REGIONS_OWN,
            "quarantined": _QUARANTINES,
        },
    ),
    "usage_hour": Proven((ProvenBy.TRANSFERS,)),
    "usage_day": Proven((ProvenBy.TRANSFERS,)),
    "labelled_usage": Proven((ProvenBy.TRANSFERS,)),
    "period": Proven((ProvenBy.AUDIT, ProvenBy.KEYS)),
    "adjustment": Proven((ProvenBy.AUDIT, ProvenBy.TRANSFERS)),
    "resolution": Proven((ProvenBy.AUDIT,)),
    "limits_version": Proven((ProvenBy.AUDIT,)),
    "subscription": Proven((ProvenBy.AUDIT,)),
    "limit_override": Proven((ProvenBy.AUDIT,)),
    "identity": Proven((ProvenBy.AUDIT,)),
    "region_identity": Proven((ProvenBy.AUDIT,)),
    "token": Proven((ProvenBy.AUDIT,), {"hash": "an audit that had it would help those who guess weak tokens"}),
    "region_epoch": Proven(
        (ProvenBy.CHAINS, ProvenBy.AUDIT),
        {
            "state": "it is proven where it is retired; else it says who may still be granted units",
            "nonce": "a store's name: it admits and bills nothing",
            "fingerprint": "a store's name: it admits and bills nothing",
            "lanes": "the lanes themselves are proven",
            "cell": "which part of a Cluster reports: nothing is billed by it",
            "cells": "which part of a Cluster reports: nothing is billed by it",
            "opened_at": "nothing is billed by it",
            "fenced_at": "nothing is billed by it",
            "lost_data": "it says whether returns count; those that were booked are transfers",
            "loss_is_assumed": "it says whether returns count; those that were booked are transfers",
        },
    ),
    "archive": Proven(
        (ProvenBy.AUDIT,),
        {
            "requested_by": "the entry of the audit names who requested it",
            "requested_at": "progress of the work",
            "attempt": "progress of the work",
            "rows": "progress of the work",
            "bytes": "progress of the work",
            "failure": "progress of the work",
        },
    ),
    "archived_sum": Proven(
        (ProvenBy.CHAINS, ProvenBy.TRANSFERS), {"cause": "the archive has it: sums are compared by their accounts"}
    ),
    "alembic_version": NotProven("it names the schema; the guards of that schema are compared"),
    "label_set": NotProven("which labels are told apart from now on; usage has its labels in its transfers"),
    "region": NotProven("weight and status steer grants; each change is in the audit"),
    "quarantine": NotProven("what was not booked, kept for people; what they decide is proven"),
    "region_setting": NotProven(_STEERS),
    "floor_hold": NotProven(_STEERS),
    "rebalance": NotProven("an order to move units between regions; the moved units are transfers"),
    "rebalance_move": NotProven("an order to move units between regions; the moved units are transfers"),
    "shared_limit": NotProven("rates are not billed"),
    "tenant": NotProven("names and addresses, on which no unit depends; each change is in the audit"),
    "block": NotProven("a block denies, and bills nothing; each change is in the audit"),
    "block_version": NotProven("a counter that tells agents to read the blocks again"),
    "reset": NotProven("rates are not billed; each reset is in the audit"),
    "policy_version": NotProven("a counter that tells agents to read the limits again"),
    "verification": NotProven("answers to earlier verifications: verify again"),
    "export": NotProven("made from proven rows; request it again and compare its sha256"),
    "export_part": NotProven("the bytes of an export; request it again and compare its sha256"),
    "webhook": NotProven("where events are sent; each change is in the audit"),
    "installation": NotProven("the id that webhooks name; each confirmation is in the audit"),
    "outbox": NotProven("events on their way; what they tell is proven where it is kept"),
    "delivery": NotProven("attempts to deliver events"),
    "idempotency_record": NotProven("answers that an Idempotency-Key repeats; what was done is proven"),
    "measurement": NotProven("figures for metrics, measured again and again"),
    "region_last_seen": NotProven("when each region was last heard: health shows it"),
    "region_agent": NotProven("which release each agent is of, and when it was last heard"),
    "job": NotProven("when a job is due"),
    "decision": NotProven("what agents say that they decided; nothing is computed from it, and it is kept for days"),
    "decision_hash_key": NotProven("the key of hashes in the decision log, on which no unit depends"),
    "position_gate": NotProven("it has no rows: it is locked"),
}
