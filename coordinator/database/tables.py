"""The tables of the database, as SQLAlchemy declares them: composed statements are built from these.

`migrations/schema.sql` creates them, and says what each column means; a test compares both. What the database enforces
beyond types and keys (checks, indexes, triggers) is in that file alone.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP, UUID

metadata = MetaData()
Timestamp = TIMESTAMP(timezone=True)


def required(name: str, *type_and_keys: Any, **options: Any) -> "Column[Any]":
    """Return a column that is NOT NULL."""
    return Column(name, *type_and_keys, nullable=False, **options)


def units(names: str) -> "list[Column[int]]":
    """Return columns that count units, or other things, from zero."""
    return [required(name, BigInteger, server_default=text("0")) for name in names.split()]


def usage(name: str, *more: "Column[Any]") -> Table:
    """Return a table of usage by hours or days, and by further columns."""
    by = "tenant begins_at quota period region policy charge_period route_class api_key degraded counted_as"
    return Table(
        name,
        metadata,
        required("begins_at", Timestamp),
        required("period", Text),
        required("charge_period", Text),
        required("quota", Text),
        required("name", Text),
        Column("tenant", Text),
        required("region", Text),
        Column("policy", Text),
        Column("route_class", Text),
        Column("api_key", Text),
        Column("degraded", Text),
        Column("counted_as", Text),
        *more,
        required("units", BigInteger),
        UniqueConstraint(
            *(*by.split(), *(each.name for each in more)),
            name=f"{name}_row_is_unique",
            postgresql_nulls_not_distinct=True,
        ),
    )


# --- Regions, epochs and lanes ----------------------------------------------------------------------------------------

region = Table(
    "region",
    metadata,
    Column("name", Text, primary_key=True),
    required("weight", BigInteger, server_default=text("1")),
    required("status", Text, server_default="active"),
    Column(
        "hold_key", LargeBinary, server_default=text("(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()))")
    ),
    required("created_at", Timestamp),
)
# The last time at which any coordinator heard each region.
region_last_seen = Table(
    "region_last_seen",
    metadata,
    Column("region", Text, ForeignKey("region.name"), primary_key=True),
    required("last_seen_at", Timestamp),
)
# What each agent last stated about itself.
region_agent = Table(
    "region_agent",
    metadata,
    Column("region", Text, ForeignKey("region.name"), primary_key=True),
    Column("agent", Text, primary_key=True),
    required("release", Text),
    required("capabilities", ARRAY(Text)),
    required("last_seen_at", Timestamp),
)
# Names in client certificates by which agents of a region authenticate themselves.
region_identity = Table(
    "region_identity",
    metadata,
    Column("identity", Text, primary_key=True),
    required("region", Text, ForeignKey("region.name")),
    required("created_at", Timestamp),
)
# One incarnation of a region's store, or of one cell of it.
region_epoch = Table(
    "region_epoch",
    metadata,
    Column("epoch", BigInteger, Identity(always=True), primary_key=True),
    required("region", Text, ForeignKey("region.name")),
    required("cell", Integer, server_default=text("0")),
    required("cells", Integer, server_default=text("1")),
    required("nonce", Text, unique=True),
    required("fingerprint", Text),
    required("lanes", Integer),
    required("state", Text, server_default="current"),
    required("opened_at", Timestamp),
    Column("fenced_at", Timestamp),
    required("lost_data", Boolean, server_default=false()),
    required("loss_is_assumed", Boolean, server_default=false()),
    Column("retired_at", Timestamp),
    Column("retired_by", UUID),
    Column("retired_because", Text),
)
# A numbered conversation of an epoch.
lane = Table(
    "lane",
    metadata,
    Column("epoch", BigInteger, ForeignKey("region_epoch.epoch"), primary_key=True),
    Column("lane", Integer, primary_key=True),
    *units("last_seq"),
    Column("last_hash", LargeBinary),
    required("head", LargeBinary),
)

# --- Periods and pools ------------------------------------------------------------------------------------------------

# A billing period, with the state of its close.
period = Table(
    "period",
    metadata,
    Column("id", Text, primary_key=True),
    required("kind", Text),
    Column("calendar", Text),
    required("starts_at", Timestamp),
    required("ends_at", Timestamp),
    required("state", Text, server_default="open"),
    Column("close_requested_at", Timestamp),
    Column("close_requested_by", Text),
    required("carries_suspense", Boolean, server_default=false()),
    required("leaves_holds", Boolean, server_default=false()),
    Column("closed_at", Timestamp),
    Column("position", BigInteger),
    Column("transfers", BigInteger),
    Column("root", LargeBinary),
)
# The balances of one allowance in one period.
pool = Table(
    "pool",
    metadata,
    Column("quota", Text, primary_key=True),
    Column("period", Text, ForeignKey("period.id"), primary_key=True),
    required("name", Text),
    Column("tenant", Text),
    *units("funded soft_cap_extension carried_over_in adjustment overage suspense_carried_in correction"),
    *units("unallocated outstanding suspense suspense_carried suspense_carried_out carried_over_out"),
    *units("estimated consumed written_off credited overage_used"),
    required("open_moves", Integer, server_default=text("0")),
)

# --- Leases and reports -----------------------------------------------------------------------------------------------

# What one epoch may spend of a pool.
lease = Table(
    "lease",
    metadata,
    Column("epoch", BigInteger, ForeignKey("region_epoch.epoch"), primary_key=True),
    Column("quota", Text, primary_key=True),
    Column("period", Text, primary_key=True),
    required("region", Text, ForeignKey("region.name")),
    required("state", Text, server_default="active"),
    *units("granted overage"),
    *units("consumed returned outstanding suspense suspense_carried_out estimated written_off"),
    *units("region_consumed region_returned"),
    *units("demand_milli waiting last_grant overdraft overdrawn"),
    required("reported_at", Timestamp),
    required("expires_at", Timestamp),
    ForeignKeyConstraint(["quota", "period"], ["pool.quota", "pool.period"]),
)
# An exchange whose report was booked.
report = Table(
    "report",
    metadata,
    Column("epoch", BigInteger, primary_key=True),
    Column("lane", Integer, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    required("position", BigInteger, Identity(always=True), unique=True),
    required("body_hash", LargeBinary),
    required("head", LargeBinary),
    required("lines", Integer),
    required("recorded_at", Timestamp),
    ForeignKeyConstraint(["epoch", "lane"], ["lane.epoch", "lane.lane"]),
)
# Reports that were not booked and are kept for people to judge.
quarantine = Table(
    "quarantine",
    metadata,
    Column("epoch", BigInteger, primary_key=True),
    Column("lane", Integer, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("quota", Text, primary_key=True),
    Column("period", Text, primary_key=True),
    required("reason", Text),
    required("evidence", JSONB),
    required("recorded_at", Timestamp),
)

# --- Transfers --------------------------------------------------------------------------------------------------------

# Every movement of units, in a partition for each period.
transfer = Table(
    "transfer",
    metadata,
    required("id", BigInteger, Identity(always=True)),
    required("period", Text),
    required("charge_period", Text),
    required("quota", Text),
    required("src", Text),
    required("dst", Text),
    required("units", BigInteger),
    required("cause", Text),
    Column("region", Text),
    Column("epoch", BigInteger),
    Column("lane", Integer),
    Column("seq", BigInteger),
    Column("line", Integer),
    required("part", Integer, server_default=text("0")),
    Column("movement_id", UUID),
    Column("window_at", Timestamp),
    Column("dimensions", JSONB),
    Column("reverses", BigInteger),
    required("recorded_at", Timestamp),
    UniqueConstraint("epoch", "lane", "seq", "line", "part", "period", name="transfer_of_report"),
    PrimaryKeyConstraint("period", "id"),
    postgresql_partition_by="LIST (period)",
)

# --- Usage ------------------------------------------------------------------------------------------------------------

# Usage by the hour and by the day, added up by a trigger of `transfer`.
usage_hour = usage("usage_hour")
usage_day = usage("usage_day")
labelled_usage = usage("labelled_usage", required("labels", Text))
# The sets of labels that usage of a quota key is told apart by.
label_set = Table(
    "label_set",
    metadata,
    Column("period", Text, primary_key=True),
    Column("quota", Text, primary_key=True),
    Column("labels", Text, primary_key=True),
)

# --- Corrections ------------------------------------------------------------------------------------------------------

# What became, in a later period, of a lease whose own period is closed.
correction = Table(
    "correction",
    metadata,
    Column("epoch", BigInteger, ForeignKey("region_epoch.epoch"), primary_key=True),
    Column("quota", Text, primary_key=True),
    Column("charge_period", Text, primary_key=True),
    Column("period", Text, primary_key=True),
    required("region", Text, ForeignKey("region.name")),
    *units("suspense_carried_in correction"),
    *units("suspense_carried suspense_carried_out estimated consumed written_off"),
    *units("replaced recovered overage_used"),
    *units("region_consumed region_returned"),
    required("quarantined", Boolean, server_default=false()),
    ForeignKeyConstraint(["quota", "period"], ["pool.quota", "pool.period"]),
)
# How people end suspense that no evidence ends.
resolution = Table(
    "resolution",
    metadata,
    Column("id", UUID, primary_key=True),
    required("epoch", BigInteger, ForeignKey("region_epoch.epoch", name="resolution_of_an_epoch")),
    Column("quota", Text),
    Column("period", Text),
    Column("lane", Integer),
    Column("seq", BigInteger),
    required("kind", Text),
    required("suspense", BigInteger),
    required("charged", BigInteger),
    required("reason", Text),
    required("proposed_by", UUID),
    required("proposed_at", Timestamp),
    Column("approved_by", UUID),
    Column("approved_at", Timestamp),
    Column("bulk", UUID),
    ForeignKeyConstraint(["epoch", "lane"], ["lane.epoch", "lane.lane"], name="resolution_of_a_lane"),
)
# Credits, debits and write-offs by two people.
adjustment = Table(
    "adjustment",
    metadata,
    Column("id", UUID, primary_key=True),
    required("quota", Text),
    required("period", Text),
    required("kind", Text),
    required("units", BigInteger),
    required("reason", Text),
    required("document", Text),
    required("proposed_by", UUID),
    required("proposed_at", Timestamp),
    required("expires_at", Timestamp),
    Column("approved_by", UUID),
    Column("approved_at", Timestamp),
    Column("booked_in", Text),
    Column("withdrawn_by", UUID),
    Column("withdrawn_at", Timestamp),
    ForeignKeyConstraint(["quota", "booked_in"], ["pool.quota", "pool.period"]),
)

# --- Closed periods ---------------------------------------------------------------------------------------------------


# --- Limits -----------------------------------------------------------------------------------------------------------

# One row: the number grows with every change that agents must hear of.
policy_version = Table(
    "policy_version",
    metadata,
    Column("only_row", Boolean, primary_key=True, server_default=true()),
    required("version", BigInteger),
    required("stamp", UUID, server_default=text("gen_random_uuid()")),
)
# The limits documents that people applied.
limits_version = Table(
    "limits_version",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    required("document", JSONB),
    required("applied_at", Timestamp),
    required("applied_by", Text),
)
# The plan of each tenant.
subscription = Table(
    "subscription",
    metadata,
    Column("tenant", Text, primary_key=True),
    required("plan", Text),
    required("began_at", Timestamp, server_default=text("now()")),
    required("changed_at", Timestamp),
)
# What is registered of a tenant.
tenant = Table(
    "tenant",
    metadata,
    Column("id", Text, primary_key=True),
    required("profile", JSONB),
    required("changed_at", Timestamp),
)
# Another limit for some of a quota's subjects, for a while.
limit_override = Table(
    "limit_override",
    metadata,
    Column("id", UUID, primary_key=True),
    required("key", Text),
    required("quota", Text),
    required("subject", JSONB),
    required("value", JSONB),
    required("valid_from", Timestamp),
    Column("valid_until", Timestamp),
    required("reason", Text),
    required("created_at", Timestamp),
    required("created_by", Text),
)
# Subjects that are denied in all regions.
block = Table(
    "block",
    metadata,
    Column("field", Text, primary_key=True),
    Column("value", Text, primary_key=True),
    required("reason", Text),
    required("created_at", Timestamp),
    required("created_by", Text),
    Column("valid_until", Timestamp),
)
# One row, as `policy_version`.
block_version = Table(
    "block_version",
    metadata,
    Column("only_row", Boolean, primary_key=True, server_default=true()),
    required("version", BigInteger),
    required("stamp", UUID, server_default=text("gen_random_uuid()")),
)
# Keys of rates that people have reset.
reset = Table(
    "reset",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    required("quota", Text),
    required("subject", JSONB),
    required("keys", ARRAY(Text)),
    required("reason", Text),
    required("created_at", Timestamp),
    required("created_by", Text),
)

# --- Rebalancing ------------------------------------------------------------------------------------------------------

# What people set for a region's part of a quota.
region_setting = Table(
    "region_setting",
    metadata,
    Column("key", Text, primary_key=True),
    Column("region", Text, ForeignKey("region.name"), primary_key=True),
    Column("weight", BigInteger),
    Column("floor", JSONB),
    Column("ceiling", JSONB),
    required("changed_at", Timestamp),
    required("changed_by", Text),
)
# An order of people to move units between regions.
rebalance = Table(
    "rebalance",
    metadata,
    Column("id", UUID, primary_key=True),
    required("version", BigInteger, Identity(always=True), unique=True),
    required("mode", Text),
    required("request", JSONB),
    required("plan", JSONB),
    Column("region", Text, ForeignKey("region.name")),
    required("recalled", BigInteger),
    *units("returned"),
    required("state", Text),
    Column("reason", Text),
    required("created_at", Timestamp),
    required("created_by", Text),
    Column("ended_at", Timestamp),
)
# Units that a rebalance moves, and how far they have come.
rebalance_move = Table(
    "rebalance_move",
    metadata,
    Column("rebalance", UUID, ForeignKey("rebalance.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    required("quota", Text),
    required("period", Text),
    required("source", Text, ForeignKey("region.name")),
    Column("target", Text, ForeignKey("region.name")),
    required("units", BigInteger),
    *units("returned regranted"),
    Column("reason", Text),
    Column("ended_at", Timestamp),
    ForeignKeyConstraint(["quota", "period"], ["pool.quota", "pool.period"]),
)

# What is kept for a region after a move, like a floor, until a time.
floor_hold = Table(
    "floor_hold",
    metadata,
    Column("quota", Text, primary_key=True),
    Column("period", Text, primary_key=True),
    Column("region", Text, ForeignKey("region.name"), primary_key=True),
    required("units", BigInteger),
    required("until", Timestamp),
    required("rebalance", UUID, ForeignKey("rebalance.id")),
    ForeignKeyConstraint(["quota", "period"], ["pool.quota", "pool.period"]),
)

# --- Shared limits ----------------------------------------------------------------------------------------------------

# The shares of rates and slots that may be in force.
shared_limit = Table(
    "shared_limit",
    metadata,
    Column("quota", Text, primary_key=True),
    required("state", LargeBinary),
    required("reported_at", Timestamp),
    prefixes=["UNLOGGED"],
)

# --- Proof ------------------------------------------------------------------------------------------------------------

# A lock, without columns or rows, that makes a sealed position final.
position_gate = Table(
    "position_gate",
    metadata,
)
# A hash over the ledger up to a position.
seal = Table(
    "seal",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    required("previous", LargeBinary),
    required("position", BigInteger),
    required("transfer", BigInteger),
    required("audit", BigInteger),
    required("reports", BigInteger),
    required("reports_hash", LargeBinary),
    required("movements", BigInteger),
    required("movements_hash", LargeBinary),
    required("entries", BigInteger),
    required("entries_hash", LargeBinary),
    required("balances", JSONB),
    required("sealed_at", Timestamp, unique=True),
    required("hash", LargeBinary, unique=True),
)
# Requests to verify the ledger, and their results.
verification = Table(
    "verification",
    metadata,
    Column("id", UUID, primary_key=True),
    required("requested_by", UUID),
    required("requested_at", Timestamp),
    required("kept_seals", JSONB, server_default="[]"),
    Column("finished_at", Timestamp),
    Column("result", JSONB),
)

# --- Exports ----------------------------------------------------------------------------------------------------------

# A request for every line of usage up to a seal.
export = Table(
    "export",
    metadata,
    Column("id", UUID, primary_key=True),
    required("period", Text, ForeignKey("period.id")),
    Column("tenant", Text),
    required("format", Text),
    required("seal", BigInteger),
    required("is_final", Boolean),
    required("requested_by", UUID),
    required("requested_at", Timestamp),
    required("requesters", ARRAY(UUID), server_default="{}"),
    Column("cancelled_at", Timestamp),
    required("attempt", Integer, server_default=text("0")),
    *units("last_transfer"),
    Column("rows_expected", BigInteger),
    *units("rows bytes"),
    Column("finished_at", Timestamp),
    Column("sha256", LargeBinary),
    Column("resume_points", JSONB),
    Column("expires_at", Timestamp),
)
# The bytes of a Parquet export.
export_part = Table(
    "export_part",
    metadata,
    Column("export", UUID, ForeignKey("export.id"), primary_key=True),
    Column("starts_at", BigInteger, primary_key=True),
    required("body", LargeBinary),
)

# --- Archives ---------------------------------------------------------------------------------------------------------

# Closed periods whose lines are in files, or are being written there.
archive = Table(
    "archive",
    metadata,
    Column("period", Text, ForeignKey("period.id"), primary_key=True),
    required("requested_by", UUID),
    required("requested_at", Timestamp),
    required("attempt", Integer, server_default=text("0")),
    *units("rows bytes"),
    Column("failure", Text),
    Column("location", Text),
    Column("folder", Text),
    Column("manifest_sha256", LargeBinary),
    *(Column(name, BigInteger) for name in ("transfers", "first_position", "last_position", "last_transfer")),
    Column("usage_sha256", LargeBinary),
    Column("archived_at", Timestamp),
)
# The sums of the transfers that left the database.
archived_sum = Table(
    "archived_sum",
    metadata,
    required("period", Text, ForeignKey("period.id")),
    required("charge_period", Text),
    required("quota", Text),
    required("epoch", BigInteger),
    required("lane", Integer),
    required("src", Text),
    required("dst", Text),
    required("cause", Text),
    required("units", Numeric),
    required("transfers", BigInteger),
    PrimaryKeyConstraint("period", "quota", "epoch", "lane", "charge_period", "src", "dst", "cause"),
)

# --- Webhooks ---------------------------------------------------------------------------------------------------------

webhook = Table(
    "webhook",
    metadata,
    Column("id", UUID, primary_key=True),
    required("url", Text),
    required("events", ARRAY(Text)),
    required("secret", Text),
    Column("previous_secret", Text),
    Column("previous_until", Timestamp),
    required("paused", Boolean, server_default=false()),
    required("created_at", Timestamp),
    required("created_by", Text),
)
# Events, written in the transaction that they tell of.
outbox = Table(
    "outbox",
    metadata,
    Column("id", UUID, primary_key=True),
    required("kind", Text),
    required("data", JSONB),
    required("occurred_at", Timestamp),
    Column("traceparent", Text),
)
# The delivery of an event to a webhook.
delivery = Table(
    "delivery",
    metadata,
    Column("event", UUID, ForeignKey("outbox.id", ondelete="CASCADE"), primary_key=True),
    Column("webhook", UUID, ForeignKey("webhook.id", ondelete="CASCADE"), primary_key=True),
    required("attempts", Integer, server_default=text("0")),
    required("next_attempt_at", Timestamp),
    Column("delivered_at", Timestamp),
    Column("dead_at", Timestamp),
    Column("status", Integer),
    Column("error", Text),
)
# One row: which installation this database belongs to.
installation = Table(
    "installation",
    metadata,
    Column("only_row", Boolean, primary_key=True, server_default=true()),
    required("id", UUID),
    required("system_identifier", Text),
    required("database_oid", BigInteger),
    required("addresses", ARRAY(Text)),
    required("confirmed_at", Timestamp),
)

# --- Access -----------------------------------------------------------------------------------------------------------

token = Table(
    "token",
    metadata,
    Column("id", UUID, primary_key=True),
    required("hash", LargeBinary, unique=True),
    required("scopes", ARRAY(Text)),
    required("note", Text, server_default=""),
    required("created_at", Timestamp),
    Column("revoked_at", Timestamp),
)
# The callers of JWTs.
identity = Table(
    "identity",
    metadata,
    Column("id", UUID, primary_key=True),
    required("issuer", Text),
    required("subject", Text),
    required("name", Text),
    required("first_seen_at", Timestamp),
    UniqueConstraint("issuer", "subject", name="identity_is_one_person"),
)
# Who did what to what.
audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    required("recorded_at", Timestamp),
    required("actor", Text),
    required("action", Text),
    required("object", Text),
    Column("request_id", Text),
    required("details", JSONB),
)
# The response to the first request with an Idempotency-Key.
idempotency_record = Table(
    "idempotency_record",
    metadata,
    Column("caller", UUID, primary_key=True),
    Column("key", Text, primary_key=True),
    required("request_hash", LargeBinary),
    required("claim", UUID),
    required("claimed_at", Timestamp),
    Column("status", Integer),
    Column("headers", JSONB),
    Column("body", LargeBinary),
)

# --- Jobs and health --------------------------------------------------------------------------------------------------

# One row for each periodic job.
job = Table(
    "job",
    metadata,
    Column("name", Text, primary_key=True),
    required("due_at", Timestamp),
)
# Decisions of agents. Rows of a day are a partition.
decision = Table(
    "decision",
    metadata,
    required("at", Timestamp),
    required("id", UUID),
    *(required(name, Text) for name in ("tenant", "region", "agent", "outcome")),
    *(Column(name, Text) for name in ("mode", "reason", "policy", "name", "quota")),
    *(Column(name, BigInteger) for name in ("cost", "limit_units", "share", "remaining", "retry_after_ms")),
    Column("degraded", Text),
    Column("epoch", BigInteger),
    Column("latency_us", BigInteger),
    Column("operation", Text),
    required("weight", Double),
    required("times", BigInteger),
    Column("last_at", Timestamp),
    Column("subject", JSONB),
    Column("others", JSONB),
    PrimaryKeyConstraint("tenant", "at", "id"),
    postgresql_partition_by="RANGE (at)",
)
# One row: the key of the hashes in the decision log.
decision_hash_key = Table(
    "decision_hash_key",
    metadata,
    Column("only_row", Boolean, primary_key=True, server_default=true()),
    required("key", LargeBinary),
)
# One row: figures for metrics and health.
measurement = Table(
    "measurement",
    metadata,
    Column("only_row", Boolean, primary_key=True, server_default=true()),
    required("figures", JSONB),
    required("measured_at", Timestamp),
)
