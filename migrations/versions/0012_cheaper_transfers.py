"""What a transfer costs beside its row: two thirds of it were an index of NULLs, a foreign key that asked for the pool
of each row, and a roll-up that took each row by itself (docs/adr/0011).

The release before runs on this schema as it is: what is refused and what is rolled up stays the same.
"""

from migrations.statements import execute

revision = "0012"
down_revision = "0011"

# Of a report's transfers it held a NULL each, all alike. It keeps its name, by which a refusal is known.
MOVEMENTS = """
-- squawk-ignore ban-drop-constraint
ALTER TABLE transfer DROP CONSTRAINT transfer_of_movement;
-- Of a table in partitions it cannot be made concurrently.
-- squawk-ignore require-concurrent-index-creation
CREATE UNIQUE INDEX transfer_of_movement ON transfer (movement_id, part, period) WHERE movement_id IS NOT NULL;
"""

# What the foreign key said, asked once for a statement. Who writes a transfer holds its pool, so it does not vanish.
POOLS = """
-- squawk-ignore ban-drop-constraint
ALTER TABLE transfer DROP CONSTRAINT transfer_quota_period_fkey;
CREATE FUNCTION refuse_transfers_of_no_pool() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    named record;
BEGIN
    FOR named IN SELECT DISTINCT quota, period FROM added LOOP
        IF NOT EXISTS (SELECT FROM pool WHERE pool.quota = named.quota AND pool.period = named.period) THEN
            RAISE foreign_key_violation
                USING MESSAGE = format('no pool: %s of %s is refused as a transfer''s', named.quota, named.period);
        END IF;
    END LOOP;
    RETURN NULL;
END $$;
CREATE TRIGGER transfer_has_a_pool AFTER INSERT ON transfer REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_transfers_of_no_pool();

CREATE FUNCTION keep_pool_of_transfers() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM transfer WHERE transfer.quota = OLD.quota AND transfer.period = OLD.period) THEN
        RAISE foreign_key_violation
            USING MESSAGE = format('the ledger is append-only: %s on a pool that has transfers is refused', TG_OP);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER pool_of_transfers_stays AFTER UPDATE OF quota, period OR DELETE ON pool
    FOR EACH ROW EXECUTE FUNCTION keep_pool_of_transfers();
CREATE TRIGGER pool_is_never_truncated BEFORE TRUNCATE ON pool
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""

# First the lines are added up, and then what belongs to their pool is looked up, once for a sum. Hours and days of UTC
# are bins of equal length, which no table of time zones has to be asked about.
ROLLUPS = """
CREATE OR REPLACE FUNCTION roll_up_usage() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM added WHERE dst = 'consumed') THEN
        RETURN NULL;
    END IF;
    WITH used AS MATERIALIZED (
        SELECT date_bin('1 hour', window_at, '2000-01-01 00:00Z') AS begins_at, period, quota, region,
            dimensions ->> 'tenant' AS tenant, dimensions ->> 'policy' AS policy, sum(units)::bigint AS units
        FROM added WHERE dst = 'consumed' GROUP BY 1, 2, 3, 4, 5, 6
    ), hours AS MATERIALIZED (
        SELECT used.begins_at, used.period, used.quota, pool.name, coalesce(pool.tenant, used.tenant) AS tenant,
            used.region, used.policy, sum(used.units)::bigint AS units
        FROM used JOIN pool ON pool.quota = used.quota AND pool.period = used.period
        GROUP BY 1, 2, 3, 4, 5, 6, 7
    ), by_hour AS (
        INSERT INTO usage_hour AS kept (begins_at, period, quota, name, tenant, region, policy, units)
        SELECT * FROM hours
        ON CONFLICT ON CONSTRAINT usage_hour_is_one_row DO UPDATE SET units = kept.units + excluded.units
    )
    INSERT INTO usage_day AS kept (begins_at, period, quota, name, tenant, region, policy, units)
    SELECT date_bin('1 day', begins_at, '2000-01-01 00:00Z'), period, quota, name, tenant, region, policy,
        sum(units)::bigint
    FROM hours GROUP BY 1, 2, 3, 4, 5, 6, 7
    ON CONFLICT ON CONSTRAINT usage_day_is_one_row DO UPDATE SET units = kept.units + excluded.units;
    RETURN NULL;
END $$;
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION roll_up_usage() SET search_path = pg_catalog, %I, pg_temp', current_schema());
END $$;
"""


def upgrade() -> None:
    execute(MOVEMENTS)
    execute(POOLS)
    execute(ROLLUPS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
