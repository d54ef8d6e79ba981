"""How the ledger is kept: transfers in partitions, usage rolled up, and an audit of what people did.

Code of the release before runs on this schema as it is. A partition is made when its period is inserted and usage is
rolled up when transfers are inserted, both by triggers, so no coordinator can forget either. The triggers run as the
owner of the schema, with a search path of their own: the coordinator's role (migrations/roles.py) can neither create a
table nor change a rollup, and still both happen in its transaction.
"""

from migrations.statements import execute

revision = "0002"
down_revision = "0001"

# Kept aside while the table is made anew. It is small where this runs first; a large one takes its time, locked.
SET_ASIDE = """
-- squawk-ignore prefer-robust-stmts
CREATE TEMP TABLE transfer_before ON COMMIT DROP AS SELECT * FROM transfer;
-- squawk-ignore ban-drop-table
DROP TABLE transfer;
"""

TRANSFERS = """
-- Every movement of allowance units. One row carries both sides, so that the books balance by construction.
CREATE TABLE transfer (
    id            bigint GENERATED ALWAYS AS IDENTITY,
    period        text NOT NULL,
    quota         text NOT NULL,
    src           text NOT NULL,
    dst           text NOT NULL,
    units         bigint NOT NULL CONSTRAINT transfer_moves_something CHECK (units > 0),
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
    CONSTRAINT transfer_has_two_sides CHECK (src <> dst),
    CONSTRAINT transfer_src_is_known CHECK (src IN (
        'funding', 'unallocated', 'outstanding', 'consumed', 'suspense', 'estimated', 'written_off', 'overage',
        'carried', 'carried_out', 'correction', 'adjustment')),
    CONSTRAINT transfer_dst_is_known CHECK (dst IN (
        'funding', 'unallocated', 'outstanding', 'consumed', 'suspense', 'estimated', 'written_off', 'overage',
        'carried', 'carried_out', 'correction', 'adjustment')),
    -- A movement is either a report's or the coordinator's own; each is booked once.
    CONSTRAINT transfer_has_one_origin CHECK ((movement_id IS NULL) = (seq IS NOT NULL)),
    CONSTRAINT transfer_of_report_is_named CHECK (
        seq IS NULL OR (epoch IS NOT NULL AND lane IS NOT NULL AND line IS NOT NULL)),
    -- Usage that no question about a time or a region would find is a bill that nobody sends.
    CONSTRAINT transfer_of_usage_is_placed CHECK (cause <> 'usage' OR (window_at IS NOT NULL AND region IS NOT NULL)),
    -- The report first: whoever has a report finds its transfers by this key.
    CONSTRAINT transfer_of_report UNIQUE (epoch, lane, seq, line, part, period),
    CONSTRAINT transfer_of_movement UNIQUE (movement_id, part, period),
    FOREIGN KEY (quota, period) REFERENCES pool
) PARTITION BY LIST (period);
CREATE INDEX transfer_usage ON transfer (window_at, quota) INCLUDE (region, units) WHERE cause = 'usage';

-- For each row, for only those are handed down to partitions: a statement may name a partition itself.
CREATE TRIGGER transfer_is_append_only BEFORE UPDATE OR DELETE ON transfer
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER transfer_is_never_truncated BEFORE TRUNCATE ON transfer
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""

# A table of its own first, and then a partition: attaching waits for no reader and no writer of the other partitions,
# which making it in one step would. Its name is the period's id, in quotes: "transfer_2026-11".
PARTITIONS = """
ALTER TABLE period ADD CONSTRAINT period_names_a_table CHECK (id ~ '^[0-9A-Za-z:_-]{1,50}$') NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE period VALIDATE CONSTRAINT period_names_a_table;

CREATE FUNCTION make_partition(home text, period text) RETURNS void LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    partition text := format('%I.%I', home, 'transfer_' || period);
    whole     text := format('%I.transfer', home);
BEGIN
    EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)',
        partition, whole);
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES IN (%L)', whole, partition, period);
    EXECUTE format('CREATE TRIGGER transfer_is_never_truncated BEFORE TRUNCATE ON %s
        FOR EACH STATEMENT EXECUTE FUNCTION %I.refuse_change()', partition, home);
END $$;
CREATE FUNCTION open_period() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('SELECT %I.make_partition($1, $2)', TG_TABLE_SCHEMA) USING TG_TABLE_SCHEMA, NEW.id;
    RETURN NULL;
END $$;
CREATE TRIGGER period_has_a_partition AFTER INSERT ON period FOR EACH ROW EXECUTE FUNCTION open_period();
"""

# What finance asks for is hours, days and months. Whoever holds a pool holds its rows here: the key has both its parts.
ROLLUPS = """
CREATE TABLE usage_hour (
    begins_at   timestamptz NOT NULL,
    period      text NOT NULL,
    quota       text NOT NULL,
    name        text NOT NULL,                 -- of the quota, without its dimensions
    tenant      text,                          -- the quota's, or of others the usage line's
    region      text NOT NULL,
    policy      text,
    units       bigint NOT NULL CONSTRAINT usage_hour_is_of_something CHECK (units > 0),
    CONSTRAINT usage_hour_is_one_row UNIQUE NULLS NOT DISTINCT (tenant, begins_at, quota, period, region, policy)
) WITH (fillfactor = 80);
CREATE INDEX usage_hour_by_time ON usage_hour (begins_at);

CREATE TABLE usage_day (
    begins_at   timestamptz NOT NULL,          -- midnight in UTC
    period      text NOT NULL,
    quota       text NOT NULL,
    name        text NOT NULL,
    tenant      text,
    region      text NOT NULL,
    policy      text,
    units       bigint NOT NULL CONSTRAINT usage_day_is_of_something CHECK (units > 0),
    CONSTRAINT usage_day_is_one_row UNIQUE NULLS NOT DISTINCT (tenant, begins_at, quota, period, region, policy)
) WITH (fillfactor = 80);
CREATE INDEX usage_day_by_time ON usage_day (begins_at);

CREATE FUNCTION roll_up_usage() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    WITH hours AS MATERIALIZED (
        SELECT date_trunc('hour', added.window_at, 'UTC') AS begins_at, added.period, added.quota, pool.name,
            coalesce(pool.tenant, added.dimensions ->> 'tenant') AS tenant, added.region,
            added.dimensions ->> 'policy' AS policy, sum(added.units)::bigint AS units
        FROM added JOIN pool ON pool.quota = added.quota AND pool.period = added.period
        WHERE added.cause = 'usage' GROUP BY 1, 2, 3, 4, 5, 6, 7
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
CREATE TRIGGER transfer_is_rolled_up AFTER INSERT ON transfer REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION roll_up_usage();
"""

# The trigger rolls up what was booked before as well. Ids go on where they were.
CARRIED_OVER = """
SELECT make_partition(current_schema(), id) FROM period ORDER BY id;
INSERT INTO transfer OVERRIDING SYSTEM VALUE SELECT * FROM transfer_before ORDER BY id;
SELECT setval(pg_get_serial_sequence('transfer', 'id'), (SELECT coalesce(max(id), 0) + 1 FROM transfer), false);
"""

AUDIT = """
-- Who did what to what. Written in the transaction that did it, so neither is there without the other.
CREATE TABLE audit (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    recorded_at timestamptz NOT NULL,
    actor       text NOT NULL CONSTRAINT audit_has_an_actor CHECK (actor <> ''),
    action      text NOT NULL CONSTRAINT audit_action_is_named CHECK (action ~ '^[a-z_]+[.][a-z_]+$'),
    object      text NOT NULL,
    request_id  text,                          -- of what was asked over HTTP
    details     jsonb NOT NULL
);
CREATE TRIGGER audit_is_append_only BEFORE UPDATE OR DELETE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER audit_is_never_truncated BEFORE TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""


def upgrade() -> None:
    for sql in (SET_ASIDE, TRANSFERS, PARTITIONS, ROLLUPS, CARRIED_OVER, AUDIT):
        execute(sql)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
