"""Roll usage up by all that finance tells it apart by, so that any question about whole hours and days reads few rows.

What was rolled up before is made anew from the transfers, with nobody booking meanwhile: as long as that takes. The
release before runs on this schema as it is: of rows that are told apart further it reads the same sums.
"""

from migrations.statements import execute

revision = "0014"
down_revision = "0013"

_KEPT = "period, charge_period, quota, name, tenant, region, policy, route_class, api_key, degraded"
_TABLES = {"usage_hour": "1 hour", "usage_day": "1 day"}

COLUMNS = "LOCK TABLE transfer IN SHARE ROW EXCLUSIVE MODE;\n" + "".join(
    f"""
-- It is made again below.
-- squawk-ignore ban-truncate-cascade
TRUNCATE {table};
ALTER TABLE {table}
    -- Nothing is in it.
    -- squawk-ignore adding-required-field
    ADD COLUMN charge_period text NOT NULL,    -- in which it was used, and in `period` it is booked
    ADD COLUMN route_class text,
    ADD COLUMN api_key text,                   -- a hash of it
    ADD COLUMN degraded text,
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT {table}_is_one_row;
-- squawk-ignore disallowed-unique-constraint, constraint-missing-not-valid
ALTER TABLE {table} ADD CONSTRAINT {table}_is_one_row UNIQUE NULLS NOT DISTINCT
    (tenant, begins_at, quota, period, region, policy, charge_period, route_class, api_key, degraded);
-- What a statement reads.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX {table}_by_period ON {table} (period, tenant);
"""
    for table in _TABLES
)


def _rolled_up(added: str) -> str:
    """Lines are added up first, and only then taken apart, by what they say, and joined to their pool."""
    return f"""
    WITH used AS MATERIALIZED (
        SELECT date_bin('1 hour', window_at, '2000-01-01 00:00Z') AS begins_at, period, charge_period, quota, region,
            dimensions, sum(units)::bigint AS units
        FROM {added} AS added WHERE dst = 'consumed' GROUP BY 1, 2, 3, 4, 5, 6
    ), hours AS MATERIALIZED (
        SELECT used.begins_at, used.period, used.charge_period, used.quota, pool.name,
            coalesce(pool.tenant, used.dimensions ->> 'tenant') AS tenant, used.region,
            used.dimensions ->> 'policy' AS policy, used.dimensions ->> 'route_class' AS route_class,
            used.dimensions ->> 'api_key' AS api_key, used.dimensions ->> 'degraded' AS degraded,
            sum(used.units)::bigint AS units
        FROM used JOIN pool ON pool.quota = used.quota AND pool.period = used.period
        GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
    ), by_hour AS (
        INSERT INTO usage_hour AS kept (begins_at, {_KEPT}, units) SELECT begins_at, {_KEPT}, units FROM hours
        ON CONFLICT ON CONSTRAINT usage_hour_is_one_row DO UPDATE SET units = kept.units + excluded.units
    )
    INSERT INTO usage_day AS kept (begins_at, {_KEPT}, units)
    SELECT date_bin('1 day', begins_at, '2000-01-01 00:00Z'), {_KEPT}, sum(units)::bigint
    FROM hours GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
    ON CONFLICT ON CONSTRAINT usage_day_is_one_row DO UPDATE SET units = kept.units + excluded.units;"""  # noqa: S608


ROLLUPS = f"""
CREATE OR REPLACE FUNCTION roll_up_usage() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM added WHERE dst = 'consumed') THEN
        RETURN NULL;
    END IF;
    {_rolled_up("added")}
    RETURN NULL;
END $$;
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION roll_up_usage() SET search_path = pg_catalog, %I, pg_temp', current_schema());
END $$;
"""
MADE_ANEW = _rolled_up("transfer")


def upgrade() -> None:
    for sql in (COLUMNS, ROLLUPS, MADE_ANEW):
        execute(sql)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
