"""The ledger, and what leads to it.

Every identity that protocol.md promises is a CHECK here, so that a bug cannot be booked: the transaction fails instead.
"""

from migrations.statements import execute

revision = "0001"
down_revision = None

REGIONS = """
CREATE TABLE region (
    name        text PRIMARY KEY CHECK (name ~ '^[a-z][a-z0-9-]{0,30}$'),
    weight      bigint NOT NULL DEFAULT 1 CHECK (weight BETWEEN 0 AND 1000000),
    status      text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'draining', 'down')),
    created_at  timestamptz NOT NULL
);

CREATE TABLE region_epoch (
    epoch       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    region      text NOT NULL REFERENCES region,
    nonce       text NOT NULL UNIQUE,          -- a nonce opens one epoch, once, in the whole system
    fingerprint text NOT NULL,
    lanes       integer NOT NULL CHECK (lanes BETWEEN 1 AND 64),
    state       text NOT NULL DEFAULT 'current' CHECK (state IN ('current', 'fenced', 'retired')),
    opened_at   timestamptz NOT NULL,
    fenced_at   timestamptz
);
-- One writer: a region has one epoch that may be granted to.
CREATE UNIQUE INDEX region_epoch_current ON region_epoch (region) WHERE state = 'current';

CREATE TABLE lane (
    epoch       bigint NOT NULL REFERENCES region_epoch,
    lane        integer NOT NULL CHECK (lane >= 0),
    last_seq    bigint NOT NULL DEFAULT 0 CHECK (last_seq >= 0),
    last_hash   bytea,                         -- of the last booked batch: the same again is a replay
    head        bytea NOT NULL,                -- of the lane's chain of reports
    PRIMARY KEY (epoch, lane)
);
"""

BOOKS = """
CREATE TABLE period (
    id          text PRIMARY KEY,
    kind        text NOT NULL CHECK (kind IN ('hour', 'day', 'month')),
    starts_at   timestamptz NOT NULL,
    ends_at     timestamptz NOT NULL CHECK (ends_at > starts_at),
    state       text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'closing', 'closed'))
);

-- One allowance in one period. `quota` is the quota key (exports:tenant=acme); name and tenant are its parts.
CREATE TABLE pool (
    quota       text NOT NULL,
    period      text NOT NULL REFERENCES period,
    name        text NOT NULL,
    tenant      text,
    funded      bigint NOT NULL DEFAULT 0 CHECK (funded >= 0),
    overage     bigint NOT NULL DEFAULT 0 CHECK (overage >= 0),
    carried_in  bigint NOT NULL DEFAULT 0 CHECK (carried_in >= 0),
    correction  bigint NOT NULL DEFAULT 0 CHECK (correction >= 0),
    unallocated bigint NOT NULL DEFAULT 0 CHECK (unallocated >= 0),
    outstanding bigint NOT NULL DEFAULT 0 CHECK (outstanding >= 0),
    suspense    bigint NOT NULL DEFAULT 0 CHECK (suspense >= 0),
    carried     bigint NOT NULL DEFAULT 0 CHECK (carried >= 0),
    carried_out bigint NOT NULL DEFAULT 0 CHECK (carried_out >= 0),
    estimated   bigint NOT NULL DEFAULT 0 CHECK (estimated >= 0),
    consumed    bigint NOT NULL DEFAULT 0 CHECK (consumed >= 0),
    written_off bigint NOT NULL DEFAULT 0 CHECK (written_off >= 0),
    PRIMARY KEY (quota, period),
    -- Conservation per period (invariant 4).
    CONSTRAINT pool_balances CHECK (
        funded + overage + carried_in + correction
        = unallocated + outstanding + suspense + carried + carried_out + estimated + consumed + written_off)
);

CREATE TABLE lease (
    epoch       bigint NOT NULL REFERENCES region_epoch,
    quota       text NOT NULL,
    period      text NOT NULL,
    region      text NOT NULL REFERENCES region,
    state       text NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'fenced', 'quarantined')),
    granted     bigint NOT NULL DEFAULT 0 CHECK (granted >= 0),
    overage     bigint NOT NULL DEFAULT 0 CHECK (overage >= 0),
    consumed    bigint NOT NULL DEFAULT 0 CHECK (consumed >= 0),
    returned    bigint NOT NULL DEFAULT 0 CHECK (returned >= 0),
    outstanding bigint NOT NULL DEFAULT 0 CHECK (outstanding >= 0),
    suspense    bigint NOT NULL DEFAULT 0 CHECK (suspense >= 0),
    carried_out bigint NOT NULL DEFAULT 0 CHECK (carried_out >= 0),
    estimated   bigint NOT NULL DEFAULT 0 CHECK (estimated >= 0),
    written_off bigint NOT NULL DEFAULT 0 CHECK (written_off >= 0),
    -- The region's own totals, as its last report stated them: what reconciliation compares.
    region_consumed bigint NOT NULL DEFAULT 0 CHECK (region_consumed >= 0),
    region_returned bigint NOT NULL DEFAULT 0 CHECK (region_returned >= 0),
    -- What the region last asked for: it steers grants and recalls, and nothing else.
    demand_milli bigint NOT NULL DEFAULT 0 CHECK (demand_milli >= 0),
    waiting      bigint NOT NULL DEFAULT 0 CHECK (waiting >= 0),
    last_grant   bigint NOT NULL DEFAULT 0 CHECK (last_grant >= 0),
    reported_at  timestamptz NOT NULL,
    expires_at   timestamptz NOT NULL,
    PRIMARY KEY (epoch, quota, period),
    FOREIGN KEY (quota, period) REFERENCES pool,
    -- Conservation per lease (invariant 3).
    CONSTRAINT lease_balances CHECK (
        granted + overage
        = consumed + returned + outstanding + suspense + carried_out + estimated + written_off)
);
CREATE INDEX lease_by_pool ON lease (quota, period);

-- The idempotency of the protocol: a numbered exchange is booked once.
CREATE TABLE report (
    epoch       bigint NOT NULL,
    lane        integer NOT NULL,
    seq         bigint NOT NULL CHECK (seq > 0),
    position    bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    body_hash   bytea NOT NULL,
    head        bytea NOT NULL,                -- of the chain, this report included
    lines       integer NOT NULL CHECK (lines >= 0),
    recorded_at timestamptz NOT NULL,
    PRIMARY KEY (epoch, lane, seq),
    FOREIGN KEY (epoch, lane) REFERENCES lane
);

-- Every movement of allowance units. One row carries both sides, so that the books balance by construction.
CREATE TABLE transfer (
    id            bigint GENERATED ALWAYS AS IDENTITY,
    period        text NOT NULL,
    quota         text NOT NULL,
    src           text NOT NULL,
    dst           text NOT NULL,
    units         bigint NOT NULL CHECK (units > 0),
    cause         text NOT NULL,
    region        text,
    epoch         bigint,
    lane          integer,
    seq           bigint,
    line          integer,
    part          integer NOT NULL DEFAULT 0,
    movement_id   uuid,                        -- of what the coordinator moves by itself
    window_at     timestamptz,                 -- of usage: the minute it belongs to
    dimensions    jsonb,                       -- of usage: what finance groups by
    charge_period text NOT NULL,
    reverses      bigint,
    recorded_at   timestamptz NOT NULL,
    PRIMARY KEY (period, id),
    CHECK (src <> dst),
    CHECK (src IN ('funding', 'unallocated', 'outstanding', 'consumed', 'suspense', 'estimated', 'written_off',
                   'overage', 'carried', 'carried_out', 'correction', 'adjustment')),
    CHECK (dst IN ('funding', 'unallocated', 'outstanding', 'consumed', 'suspense', 'estimated', 'written_off',
                   'overage', 'carried', 'carried_out', 'correction', 'adjustment')),
    -- A movement is either a report's or the coordinator's own; each is booked once.
    CHECK ((movement_id IS NULL) = (seq IS NOT NULL)),
    CHECK (seq IS NULL OR (epoch IS NOT NULL AND lane IS NOT NULL AND line IS NOT NULL)),
    CONSTRAINT transfer_of_report UNIQUE (period, epoch, lane, seq, line, part),
    CONSTRAINT transfer_of_movement UNIQUE (period, movement_id, part),
    FOREIGN KEY (quota, period) REFERENCES pool
);
CREATE INDEX transfer_usage ON transfer (window_at, quota) INCLUDE (region, units) WHERE cause = 'usage';
CREATE INDEX transfer_by_pool ON transfer (quota, period);

-- Batches whose two counts disagreed, whole, for people to judge.
CREATE TABLE quarantine (
    epoch       bigint NOT NULL,
    lane        integer NOT NULL,
    seq         bigint NOT NULL,
    quota       text NOT NULL,
    period      text NOT NULL,
    reason      text NOT NULL,
    evidence    jsonb NOT NULL,
    recorded_at timestamptz NOT NULL,
    PRIMARY KEY (epoch, lane, seq, quota, period)
);

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only: % on % is refused', TG_OP, TG_TABLE_NAME;
END $$;
CREATE TRIGGER transfer_is_append_only BEFORE UPDATE OR DELETE ON transfer
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER transfer_is_never_truncated BEFORE TRUNCATE ON transfer
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER report_is_append_only BEFORE UPDATE OR DELETE ON report
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER report_is_never_truncated BEFORE TRUNCATE ON report
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""

CATALOGUE = """
-- One row: grows with every change that agents must hear of.
CREATE TABLE policy_version (
    only_row    boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    version     bigint NOT NULL
);
INSERT INTO policy_version (version) VALUES (0);

CREATE TABLE limits_version (
    version     bigint PRIMARY KEY,            -- the policy version that brought it
    document    jsonb NOT NULL,
    applied_at  timestamptz NOT NULL,
    applied_by  text NOT NULL
);

CREATE TABLE subscription (
    tenant      text PRIMARY KEY CHECK (length(tenant) BETWEEN 1 AND 256),
    plan        text NOT NULL,
    changed_at  timestamptz NOT NULL
);

CREATE TABLE token (
    id          uuid PRIMARY KEY,
    hash        bytea NOT NULL UNIQUE,         -- sha256 of 256 random bits; the token itself is kept nowhere
    scopes      text[] NOT NULL CHECK (cardinality(scopes) > 0),
    note        text NOT NULL DEFAULT '',
    created_at  timestamptz NOT NULL,
    revoked_at  timestamptz
);
"""


def upgrade() -> None:
    execute(REGIONS)
    execute(BOOKS)
    execute(CATALOGUE)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
