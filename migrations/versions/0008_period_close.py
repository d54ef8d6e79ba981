"""How a period ends: open → closing → closed, and what comes late for one that is closed.

Closed means closed, to everybody: pools, leases and corrections of a closed period are refused by triggers, and its
partition of the transfers gets one of its own at the close, so that open periods do not pay for it. What comes late is
booked in an open period, in a row of `correction` for the lease that it is about.
"""

from migrations.statements import execute

revision = "0008"
down_revision = "0006"

PERIODS = """
ALTER TABLE period
    ADD COLUMN closing_at timestamptz,          -- when somebody asked for the close: no grants from then on
    ADD COLUMN closing_by text,
    ADD COLUMN carries_suspense boolean NOT NULL DEFAULT false,  -- they know that what is in suspense leaves
    ADD COLUMN closed_at timestamptz,
    ADD COLUMN position bigint,                 -- of the ledger: of the last report at the close
    ADD COLUMN transfers bigint,                -- so many the period has
    ADD COLUMN root bytea,                      -- hashes all pools, leases and corrections, as they stay
    ADD CONSTRAINT period_is_asked_to_close CHECK (
        state = 'open' OR (closing_at IS NOT NULL AND closing_by IS NOT NULL)) NOT VALID,
    ADD CONSTRAINT period_is_closed_whole CHECK (
        (state = 'closed') = (closed_at IS NOT NULL AND position IS NOT NULL AND transfers IS NOT NULL
            AND root IS NOT NULL)) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE period VALIDATE CONSTRAINT period_is_asked_to_close;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE period VALIDATE CONSTRAINT period_is_closed_whole;

ALTER TABLE lease
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT lease_state_check,
    ADD CONSTRAINT lease_state_check CHECK (
        state IN ('active', 'expired', 'fenced', 'lost', 'quarantined', 'retired', 'closed')) NOT VALID;
"""

CORRECTIONS = """
-- What became, in a later period, of a lease whose own period is closed. It balances like a lease.
CREATE TABLE correction (
    epoch         bigint NOT NULL REFERENCES region_epoch,
    quota         text NOT NULL,
    charge_period text NOT NULL,               -- the lease's own
    period        text NOT NULL,               -- in which it is booked
    region        text NOT NULL REFERENCES region,
    carried_in    bigint NOT NULL DEFAULT 0 CHECK (carried_in >= 0),
    correction    bigint NOT NULL DEFAULT 0 CHECK (correction >= 0),
    carried       bigint NOT NULL DEFAULT 0 CHECK (carried >= 0),
    carried_out   bigint NOT NULL DEFAULT 0 CHECK (carried_out >= 0),
    estimated     bigint NOT NULL DEFAULT 0 CHECK (estimated >= 0),
    consumed      bigint NOT NULL DEFAULT 0 CHECK (consumed >= 0),
    written_off   bigint NOT NULL DEFAULT 0 CHECK (written_off >= 0),
    -- Of the closed books' estimates and write-offs: so much has given way to the truth.
    replaced      bigint NOT NULL DEFAULT 0 CHECK (replaced >= 0),
    recovered     bigint NOT NULL DEFAULT 0 CHECK (recovered >= 0),
    -- The region's own totals, as its last report stated them.
    region_consumed bigint NOT NULL DEFAULT 0 CHECK (region_consumed >= 0),
    region_returned bigint NOT NULL DEFAULT 0 CHECK (region_returned >= 0),
    quarantined   boolean NOT NULL DEFAULT false,  -- people look at what came: nothing is booked until they have
    PRIMARY KEY (epoch, quota, charge_period, period),
    FOREIGN KEY (quota, period) REFERENCES pool,
    CONSTRAINT correction_is_later CHECK (charge_period <> period),
    CONSTRAINT correction_balances CHECK (
        carried_in + correction = carried + carried_out + estimated + consumed + written_off)
);
CREATE INDEX correction_by_pool ON correction (quota, period);
"""

# A unit that was consumed is usage, whatever else its being booked replaces.
TRANSFERS = """
ALTER TABLE transfer
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT transfer_src_is_known,
    ADD CONSTRAINT transfer_src_is_known CHECK (src IN (
        'funding', 'unallocated', 'outstanding', 'consumed', 'suspense', 'estimated', 'written_off', 'overage',
        'carried', 'carried_in', 'carried_out', 'correction', 'adjustment')) NOT VALID,
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT transfer_of_usage_is_placed,
    ADD CONSTRAINT transfer_of_usage_is_placed CHECK (
        dst <> 'consumed' OR (window_at IS NOT NULL AND region IS NOT NULL)) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE transfer VALIDATE CONSTRAINT transfer_src_is_known;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE transfer VALIDATE CONSTRAINT transfer_of_usage_is_placed;
-- squawk-ignore require-concurrent-index-deletion
DROP INDEX transfer_usage;
-- Of a table in partitions it cannot be made concurrently.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX transfer_usage ON transfer (window_at, quota) INCLUDE (region, units) WHERE dst = 'consumed';

CREATE OR REPLACE FUNCTION roll_up_usage() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    WITH hours AS MATERIALIZED (
        SELECT date_trunc('hour', added.window_at, 'UTC') AS begins_at, added.period, added.quota, pool.name,
            coalesce(pool.tenant, added.dimensions ->> 'tenant') AS tenant, added.region,
            added.dimensions ->> 'policy' AS policy, sum(added.units)::bigint AS units
        FROM added JOIN pool ON pool.quota = added.quota AND pool.period = added.period
        WHERE added.dst = 'consumed' GROUP BY 1, 2, 3, 4, 5, 6, 7
    ), by_hour AS (
        INSERT INTO usage_hour AS kept (begins_at, period, quota, name, tenant, region, policy, units)
        SELECT * FROM hours
        ON CONFLICT ON CONSTRAINT usage_hour_is_one_row DO UPDATE SET units = kept.units + excluded.units
    )
    INSERT INTO usage_day AS kept (begins_at, period, quota, name, tenant, region, policy, units)
    SELECT date_trunc('day', begins_at, 'UTC'), period, quota, name, tenant, region, policy, sum(units)::bigint
    FROM hours GROUP BY 1, 2, 3, 4, 5, 6, 7
    ON CONFLICT ON CONSTRAINT usage_day_is_one_row DO UPDATE SET units = kept.units + excluded.units;
    RETURN NULL;
END $$;
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION roll_up_usage() SET search_path = pg_catalog, %I, pg_temp', current_schema());
END $$;
"""

# Statements, not rows, look whether a period is closed; `changed` is what a trigger says it is.
CLOSED = """
CREATE FUNCTION refuse_closed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    closed text := (
        SELECT id FROM period WHERE state = 'closed' AND id IN (SELECT changed.period FROM changed) LIMIT 1);
BEGIN
    IF closed IS NOT NULL THEN
        RAISE EXCEPTION 'period % is closed: % on % is refused', closed, TG_OP, TG_TABLE_NAME;
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION refuse_transfer() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'period % is closed: % on transfer is refused', NEW.period, TG_OP;
END $$;

-- Making a trigger waits for who writes the partition, and for no reader.
CREATE FUNCTION close_period() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('CREATE TRIGGER transfer_is_of_a_closed_period BEFORE INSERT ON %I.%I
        FOR EACH ROW EXECUTE FUNCTION %I.refuse_transfer()', TG_TABLE_SCHEMA, 'transfer_' || NEW.id, TG_TABLE_SCHEMA);
    RETURN NULL;
END $$;
CREATE TRIGGER period_closes_its_partition AFTER UPDATE ON period
    FOR EACH ROW WHEN (OLD.state <> 'closed' AND NEW.state = 'closed') EXECUTE FUNCTION close_period();

CREATE FUNCTION refuse_reopening() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'period % is %: % is refused', OLD.id, OLD.state, TG_OP;
END $$;
CREATE TRIGGER period_stays_closed BEFORE UPDATE OR DELETE ON period
    FOR EACH ROW WHEN (OLD.state = 'closed') EXECUTE FUNCTION refuse_reopening();
CREATE TRIGGER period_never_opens_again BEFORE UPDATE ON period
    FOR EACH ROW WHEN (OLD.state = 'closing' AND NEW.state = 'open') EXECUTE FUNCTION refuse_reopening();
"""

# What is changed is looked at as it was and as it is: a row could be moved out, or in.
FROZEN = "".join(
    f"""
CREATE TRIGGER {table}_is_not_added_to_a_closed_period AFTER INSERT ON {table}
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER {table}_is_not_changed_in_a_closed_period AFTER UPDATE ON {table}
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER {table}_is_not_moved_to_a_closed_period AFTER UPDATE ON {table}
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER {table}_is_not_deleted_from_a_closed_period AFTER DELETE ON {table}
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
"""
    for table in ("pool", "lease", "correction")
)


def upgrade() -> None:
    for sql in (PERIODS, CORRECTIONS, TRANSFERS, CLOSED, FROZEN):
        execute(sql)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
