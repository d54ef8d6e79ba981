"""Tell usage apart by labels: hourly usage by labels, and the sets of labels that each quota key has in a period.

Nothing is changed that a coordinator of the release before writes or reads. Its usage has no labels.
"""

from migrations.statements import execute

revision = "0003"
down_revision = "0002"

_SQL = """
CREATE TABLE labelled_usage (
    begins_at     timestamptz NOT NULL,
    period        text NOT NULL,
    charge_period text NOT NULL,
    quota         text NOT NULL,
    name          text NOT NULL,
    tenant        text,
    region        text NOT NULL,
    policy        text,
    route_class   text,
    api_key       text,
    degraded      text,
    counted_as    text,
    labels        text NOT NULL,                    -- such as `model=large,tier=gold`
    units         bigint NOT NULL CONSTRAINT labelled_usage_units_are_positive CHECK (units > 0),
    CONSTRAINT labelled_usage_row_is_unique UNIQUE NULLS NOT DISTINCT
        (tenant, begins_at, quota, period, region, policy, charge_period, route_class, api_key, degraded, counted_as,
            labels)
) WITH (fillfactor = 80);
CREATE INDEX labelled_usage_by_time ON labelled_usage (begins_at);
CREATE INDEX labelled_usage_by_period ON labelled_usage (period, tenant);

CREATE TABLE label_set (
    quota  text NOT NULL,
    period text NOT NULL,
    labels text NOT NULL,
    PRIMARY KEY (period, quota, labels)
);

CREATE FUNCTION roll_up_labelled_usage() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM added WHERE dst = 'consumed' AND dimensions ? 'labels') THEN
        RETURN NULL;
    END IF;
    INSERT INTO labelled_usage AS kept (begins_at, period, charge_period, quota, name, tenant, region, policy,
        route_class, api_key, degraded, counted_as, labels, units)
    SELECT date_bin('1 hour', window_at, '2000-01-01 00:00Z'), added.period, charge_period, added.quota, pool.name,
        coalesce(pool.tenant, dimensions ->> 'tenant'), region, dimensions ->> 'policy', dimensions ->> 'route_class',
        dimensions ->> 'api_key', dimensions ->> 'degraded', dimensions ->> 'counted_as', dimensions ->> 'labels',
        sum(units)::bigint
    FROM added JOIN pool ON pool.quota = added.quota AND pool.period = added.period
    WHERE dst = 'consumed' AND dimensions ? 'labels'
    GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13
    ON CONFLICT ON CONSTRAINT labelled_usage_row_is_unique DO UPDATE SET units = kept.units + excluded.units;
    RETURN NULL;
END $$;
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION roll_up_labelled_usage() SET search_path = pg_catalog, %I, pg_temp',
        current_schema());
END $$;
CREATE TRIGGER transfer_is_rolled_up_by_labels AFTER INSERT ON transfer REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION roll_up_labelled_usage();
"""


def upgrade() -> None:
    execute(_SQL)


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")
