"""Caps that are soft: what is made spendable beyond a limit, and which usage is beyond it (docs/adr/0031).

The release before runs on this schema as it is: it extends nothing, and what it books is within the limit.
"""

from migrations.statements import execute

revision = "0025"
down_revision = "0024"

_ACCOUNTS = """'funding', 'unallocated', 'outstanding', 'consumed', 'suspense', 'estimated', 'written_off', 'overage',
        'carried', 'carried_in', 'carried_out', 'correction', 'adjustment', 'extension'"""

BOOKS = """
ALTER TABLE pool
    ADD COLUMN extended bigint NOT NULL DEFAULT 0,  -- what can be spent beyond the limit
    ADD COLUMN beyond bigint NOT NULL DEFAULT 0,    -- of what was consumed in the period, what is overage
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT pool_balances,
    ADD CONSTRAINT pool_balances CHECK (
        funded + extended + adjustment + overage + carried_in + correction
        = unallocated + outstanding + suspense + carried + carried_out + estimated + consumed + written_off) NOT VALID,
    ADD CONSTRAINT pool_is_extended_by_units CHECK (extended >= 0) NOT VALID,
    ADD CONSTRAINT pool_is_beyond_by_what_was_consumed
        CHECK (beyond >= 0 AND beyond <= greatest(consumed, 0)) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE pool VALIDATE CONSTRAINT pool_balances;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE pool VALIDATE CONSTRAINT pool_is_extended_by_units;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE pool VALIDATE CONSTRAINT pool_is_beyond_by_what_was_consumed;

ALTER TABLE correction
    ADD COLUMN beyond bigint NOT NULL DEFAULT 0,    -- of what was consumed: beyond the limit of its own period
    ADD CONSTRAINT correction_is_beyond_by_what_was_consumed
        CHECK (beyond >= 0 AND beyond <= greatest(consumed, 0)) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE correction VALIDATE CONSTRAINT correction_is_beyond_by_what_was_consumed;
-- What came late for a closed period, of all its leases. A row is there for each lease that had something to say.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX correction_by_charge_period ON correction (quota, charge_period);
"""

TRANSFERS = "".join(
    f"""
ALTER TABLE transfer
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT transfer_{side}_is_known,
    ADD CONSTRAINT transfer_{side}_is_known CHECK ({side} IN ({_ACCOUNTS})) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE transfer VALIDATE CONSTRAINT transfer_{side}_is_known;
"""
    for side in ("src", "dst")
)

_KEPT = "period, charge_period, quota, name, tenant, region, policy, route_class, api_key, degraded, counted_as"
_TABLES = ("usage_hour", "usage_day")

# What is rolled up is within its limit: nothing was told apart before.
COLUMNS = "LOCK TABLE transfer IN SHARE ROW EXCLUSIVE MODE;\n" + "".join(
    f"""
ALTER TABLE {table}
    ADD COLUMN counted_as text,                     -- overage: beyond the limit
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT {table}_is_one_row;
-- squawk-ignore disallowed-unique-constraint, constraint-missing-not-valid
ALTER TABLE {table} ADD CONSTRAINT {table}_is_one_row UNIQUE NULLS NOT DISTINCT
    (tenant, begins_at, quota, period, region, policy, charge_period, route_class, api_key, degraded, counted_as);
"""
    for table in _TABLES
)

ROLLUPS = f"""
CREATE OR REPLACE FUNCTION roll_up_usage() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM added WHERE dst = 'consumed') THEN
        RETURN NULL;
    END IF;
    WITH used AS MATERIALIZED (
        SELECT date_bin('1 hour', window_at, '2000-01-01 00:00Z') AS begins_at, period, charge_period, quota, region,
            dimensions, sum(units)::bigint AS units
        FROM added WHERE dst = 'consumed' GROUP BY 1, 2, 3, 4, 5, 6
    ), hours AS MATERIALIZED (
        SELECT used.begins_at, used.period, used.charge_period, used.quota, pool.name,
            coalesce(pool.tenant, used.dimensions ->> 'tenant') AS tenant, used.region,
            used.dimensions ->> 'policy' AS policy, used.dimensions ->> 'route_class' AS route_class,
            used.dimensions ->> 'api_key' AS api_key, used.dimensions ->> 'degraded' AS degraded,
            used.dimensions ->> 'counted_as' AS counted_as, sum(used.units)::bigint AS units
        FROM used JOIN pool ON pool.quota = used.quota AND pool.period = used.period
        GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
    ), by_hour AS (
        INSERT INTO usage_hour AS kept (begins_at, {_KEPT}, units) SELECT begins_at, {_KEPT}, units FROM hours
        ON CONFLICT ON CONSTRAINT usage_hour_is_one_row DO UPDATE SET units = kept.units + excluded.units
    )
    INSERT INTO usage_day AS kept (begins_at, {_KEPT}, units)
    SELECT date_bin('1 day', begins_at, '2000-01-01 00:00Z'), {_KEPT}, sum(units)::bigint
    FROM hours GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
    ON CONFLICT ON CONSTRAINT usage_day_is_one_row DO UPDATE SET units = kept.units + excluded.units;
    RETURN NULL;
END $$;
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION roll_up_usage() SET search_path = pg_catalog, %I, pg_temp', current_schema());
END $$;
"""  # noqa: S608 - the names come from above


def upgrade() -> None:
    for sql in (BOOKS, TRANSFERS, COLUMNS, ROLLUPS):
        execute(sql)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
