-- The database schema of a Leasehold coordinator, by capability.
--
-- This file is always current: `migrations/versions/0001_baseline.py` executes it in an empty database. Tests compare
-- it with a migrated database, with the SQLAlchemy metadata (coordinator/database/tables.py), and with the guards that
-- `leasehold verify` looks for (migrations/guards.json). Privileges of the coordinator's role: migrations/roles.py.
--
-- Conventions
--   * Units are bigint, times are timestamptz in UTC, ids that callers see are UUIDs, and identifiers are text.
--   * A quota key names a quota and its subject: `exports:tenant=acme`. Column `quota` holds the key, `name` the quota.
--   * Each identity that the protocol promises is a CHECK: a bug fails the transaction instead of being booked.
--   * A CHECK without a name has the one that Postgres gives it: TABLE_COLUMN_check.
--   * The coordinator's role writes rows, and neither creates a table nor changes a rollup. Triggers that do so are
--     SECURITY DEFINER with a fixed search path, and run as the owner of the schema in the coordinator's transaction.


-- === Regions, epochs and lanes =======================================================================================

CREATE TABLE region (
    name       text PRIMARY KEY CHECK (name ~ '^[a-z][a-z0-9-]{0,30}$'),
    -- A region's part of what all regions share, in relation to the weights of the others.
    weight     bigint NOT NULL DEFAULT 1 CHECK (weight BETWEEN 0 AND 1000000),
    status     text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'draining', 'down')),
    -- The secret with which agents of the region seal the ids of holds.
    hold_key   bytea DEFAULT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
        CONSTRAINT region_has_a_hold_key CHECK (hold_key IS NOT NULL AND length(hold_key) = 32),
    created_at timestamptz NOT NULL
);

-- The last time at which any coordinator heard each region. Apart from `region`, because it is written all the time.
CREATE TABLE region_last_seen (
    region       text NOT NULL PRIMARY KEY REFERENCES region,
    last_seen_at timestamptz NOT NULL
) WITH (fillfactor = 50);

-- What each agent last stated about itself to any coordinator.
CREATE TABLE region_agent (
    region       text NOT NULL REFERENCES region,
    agent        text NOT NULL,
    release      text NOT NULL,
    capabilities text[] NOT NULL,
    last_seen_at timestamptz NOT NULL,
    PRIMARY KEY (region, agent)
) WITH (fillfactor = 50);

-- Names in client certificates by which agents of a region authenticate themselves, in place of a token.
CREATE TABLE region_identity (
    identity   text PRIMARY KEY CONSTRAINT region_identity_is_short CHECK (length(identity) BETWEEN 1 AND 1000),
    region     text NOT NULL REFERENCES region,
    created_at timestamptz NOT NULL
);

-- One incarnation of a region's store, or of one cell of a store that is a Cluster.
CREATE TABLE region_epoch (
    epoch           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    region          text NOT NULL REFERENCES region,
    cell            integer NOT NULL DEFAULT 0,     -- a store that is not a Cluster is cell 0 of 1
    cells           integer NOT NULL DEFAULT 1,
    nonce           text NOT NULL UNIQUE,           -- chosen by the agent: a nonce opens one epoch, once
    fingerprint     text NOT NULL,                  -- of the store: a copy of a store has another one
    lanes           integer NOT NULL CHECK (lanes BETWEEN 1 AND 64),
    -- current: may be granted to. fenced: its evidence is booked. retired: people decided that no more evidence counts.
    state           text NOT NULL DEFAULT 'current' CHECK (state IN ('current', 'fenced', 'retired')),
    opened_at       timestamptz NOT NULL,
    fenced_at       timestamptz,
    -- Its store lost data: units that it returned may have been spent, so returns are not booked.
    lost_data       boolean NOT NULL DEFAULT false,
    -- Nothing showed that the store lost data and nothing that it did not: a store that returns later is believed.
    loss_is_assumed boolean NOT NULL DEFAULT false,
    retired_at      timestamptz,
    retired_by      uuid,                           -- the token
    retired_because text,
    CONSTRAINT region_epoch_of_a_cell CHECK (cell >= 0 AND cell < cells),
    CONSTRAINT region_epoch_retired CHECK (
        state <> 'retired' OR (retired_at IS NOT NULL AND retired_by IS NOT NULL AND retired_because <> ''))
);
-- One writer: each cell of a region has at most one epoch that may be granted to.
CREATE UNIQUE INDEX region_epoch_current_of_cell ON region_epoch (region, cell) WHERE state = 'current';

-- A numbered conversation of an epoch.
CREATE TABLE lane (
    epoch     bigint NOT NULL REFERENCES region_epoch,
    lane      integer NOT NULL CHECK (lane >= 0),
    last_seq  bigint NOT NULL DEFAULT 0 CHECK (last_seq >= 0),
    last_hash bytea,                                -- of the last booked batch: the same bytes again are a replay
    head      bytea NOT NULL,                       -- the newest hash of the lane's chain of reports
    PRIMARY KEY (epoch, lane)
);


-- === Periods and pools ===============================================================================================

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only: % on % is refused', TG_OP, TG_TABLE_NAME;
END $$;

CREATE TABLE period (
    -- Such as `2026-11`. With `transfer_` before it, it names a partition, so it is at most 54 characters long.
    id                 text PRIMARY KEY CONSTRAINT period_names_a_table CHECK (id ~ '^[0-9A-Za-z:_-]{1,54}$'),
    kind               text NOT NULL CHECK (kind IN ('hour', 'day', 'month', 'anniversary')),
    calendar           text,  -- the kind, the time zone, and the day of an anniversary
    starts_at          timestamptz NOT NULL,
    ends_at            timestamptz NOT NULL,
    -- open: may be granted in. closing: regions account for what they hold. closed: final.
    state              text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'closing', 'closed')),
    close_requested_at timestamptz,  -- when the close was requested: nothing is granted from then on
    close_requested_by text,
    carries_suspense   boolean NOT NULL DEFAULT false,  -- the request allows units in suspense to leave the period
    leaves_holds       boolean NOT NULL DEFAULT false,  -- the request does not wait for units that services hold
    closed_at          timestamptz,
    position           bigint,  -- of the last report at the close
    transfers          bigint,  -- the number of the period's transfers
    root               bytea,  -- a hash over the period's pools, leases and corrections
    CONSTRAINT period_has_a_length CHECK (ends_at > starts_at),
    CONSTRAINT period_close_is_requested CHECK (
        state = 'open' OR (close_requested_at IS NOT NULL AND close_requested_by IS NOT NULL)),
    CONSTRAINT period_is_closed_whole CHECK (
        (state = 'closed')
        = (closed_at IS NOT NULL AND position IS NOT NULL AND transfers IS NOT NULL AND root IS NOT NULL))
);
CREATE INDEX period_by_calendar ON period (calendar, ends_at);

-- The balances of one allowance in one period: the sum of its transfers.
CREATE TABLE pool (
    quota                text NOT NULL,
    period               text NOT NULL REFERENCES period,
    name                 text NOT NULL,  -- the quota, without its subject
    tenant               text,  -- of the subject, if it has one
    -- Where units came from.
    funded               bigint NOT NULL DEFAULT 0 CHECK (funded >= 0),   -- the limit
    -- Beyond the limit, as far as the soft cap was needed.
    soft_cap_extension   bigint NOT NULL DEFAULT 0 CHECK (soft_cap_extension >= 0),
    carried_over_in      bigint NOT NULL DEFAULT 0,  -- unused units of the period before
    adjustment           bigint NOT NULL DEFAULT 0,  -- credits and write-offs less debits: may be negative
    overage              bigint NOT NULL DEFAULT 0 CHECK (overage >= 0),  -- spent by regions without a grant
    suspense_carried_in  bigint NOT NULL DEFAULT 0 CHECK (suspense_carried_in >= 0),  -- of closed periods
    correction           bigint NOT NULL DEFAULT 0 CHECK (correction >= 0),  -- late usage of closed periods
    -- Where units are.
    unallocated          bigint NOT NULL DEFAULT 0 CHECK (unallocated >= 0),  -- may be granted
    outstanding          bigint NOT NULL DEFAULT 0 CHECK (outstanding >= 0),  -- leased, and not accounted for yet
    suspense             bigint NOT NULL DEFAULT 0 CHECK (suspense >= 0),  -- leased, waiting for evidence or people
    suspense_carried     bigint NOT NULL DEFAULT 0 CHECK (suspense_carried >= 0),  -- carried in, and still waiting
    suspense_carried_out bigint NOT NULL DEFAULT 0 CHECK (suspense_carried_out >= 0),  -- at the close of this period
    carried_over_out     bigint NOT NULL DEFAULT 0,  -- unused units that went into the period after
    estimated            bigint NOT NULL DEFAULT 0 CHECK (estimated >= 0),  -- billed in place of missing evidence
    consumed             bigint NOT NULL DEFAULT 0 CHECK (consumed >= 0),
    written_off          bigint NOT NULL DEFAULT 0 CHECK (written_off >= 0),
    -- Parts of the above.
    credited             bigint NOT NULL DEFAULT 0,  -- of `adjustment`, what can be spent: credits less debits
    overage_used         bigint NOT NULL DEFAULT 0,  -- of `consumed`, what is beyond the limit
    -- The number of rebalance moves that are open in this pool: where there are none, none are looked for.
    open_moves           integer NOT NULL DEFAULT 0,
    PRIMARY KEY (quota, period),
    -- Conservation per period (invariant 4).
    CONSTRAINT pool_balances CHECK (
        funded + soft_cap_extension + carried_over_in + adjustment + overage + suspense_carried_in + correction
        = unallocated + outstanding + suspense + suspense_carried + suspense_carried_out + carried_over_out + estimated
            + consumed + written_off),
    CONSTRAINT pool_carry_over_is_not_negative CHECK (carried_over_in >= 0 AND carried_over_out >= 0),
    CONSTRAINT pool_credits_are_adjustments CHECK (adjustment >= credited),
    CONSTRAINT pool_entitlement_is_not_negative CHECK (funded + credited >= 0),
    CONSTRAINT pool_overage_was_consumed CHECK (overage_used >= 0 AND overage_used <= greatest(consumed, 0))
);
-- A tenant that changes its plan has its pools funded anew at once.
CREATE INDEX pool_by_tenant ON pool (tenant, period);


-- === Leases and reports ==============================================================================================

-- What one epoch may spend of a pool.
CREATE TABLE lease (
    epoch           bigint NOT NULL REFERENCES region_epoch,
    quota           text NOT NULL,
    period          text NOT NULL,
    region          text NOT NULL REFERENCES region,
    -- protocol/lease.py has the states and their transitions.
    state           text NOT NULL DEFAULT 'active' CHECK (
        state IN ('active', 'expired', 'fenced', 'lost', 'quarantined', 'retired', 'closed')),
    -- Where units came from. These totals only grow.
    granted         bigint NOT NULL DEFAULT 0 CHECK (granted >= 0),
    overage         bigint NOT NULL DEFAULT 0 CHECK (overage >= 0),
    -- Where units are.
    consumed        bigint NOT NULL DEFAULT 0 CHECK (consumed >= 0),
    returned        bigint NOT NULL DEFAULT 0 CHECK (returned >= 0),
    outstanding     bigint NOT NULL DEFAULT 0 CHECK (outstanding >= 0),
    suspense        bigint NOT NULL DEFAULT 0 CHECK (suspense >= 0),
    suspense_carried_out bigint NOT NULL DEFAULT 0 CHECK (suspense_carried_out >= 0),  -- at the close
    estimated       bigint NOT NULL DEFAULT 0 CHECK (estimated >= 0),
    written_off     bigint NOT NULL DEFAULT 0 CHECK (written_off >= 0),
    -- The region's own totals, as its last report stated them: a reconciliation compares them with the above.
    region_consumed bigint NOT NULL DEFAULT 0 CHECK (region_consumed >= 0),
    region_returned bigint NOT NULL DEFAULT 0 CHECK (region_returned >= 0),
    -- The region's demand. It steers grants and recalls, and nothing else.
    demand_milli    bigint NOT NULL DEFAULT 0 CHECK (demand_milli >= 0),
    waiting         bigint NOT NULL DEFAULT 0 CHECK (waiting >= 0),
    last_grant      bigint NOT NULL DEFAULT 0 CHECK (last_grant >= 0),
    -- What the region may spend beyond its grants while it is cut off, and of that, what it reports to have spent.
    overdraft       bigint NOT NULL DEFAULT 0,
    overdrawn       bigint NOT NULL DEFAULT 0,
    reported_at     timestamptz NOT NULL,
    expires_at      timestamptz NOT NULL,
    PRIMARY KEY (epoch, quota, period),
    FOREIGN KEY (quota, period) REFERENCES pool,
    -- Conservation per lease (invariant 3).
    CONSTRAINT lease_balances CHECK (
        granted + overage
        = consumed + returned + outstanding + suspense + suspense_carried_out + estimated + written_off),
    CONSTRAINT lease_overdraft_is_not_negative CHECK (overdraft >= 0 AND overdrawn >= 0)
);
CREATE INDEX lease_by_pool ON lease (quota, period);
-- Leases that jobs look for again and again are few among all that there are.
CREATE INDEX lease_to_expire ON lease (expires_at) WHERE outstanding > 0;
CREATE INDEX lease_in_suspense ON lease (epoch) WHERE suspense > 0;
-- Its columns change only together with `expires_at`, which has an index anyway: it makes no update dearer.
CREATE INDEX lease_drifting ON lease (epoch, quota, period)
    WHERE region_consumed <> consumed AND state NOT IN ('quarantined', 'closed');

-- An exchange whose report was booked. It makes the protocol idempotent: a numbered report is booked once.
CREATE TABLE report (
    epoch       bigint NOT NULL,
    lane        integer NOT NULL,
    seq         bigint NOT NULL CHECK (seq > 0),
    position    bigint GENERATED ALWAYS AS IDENTITY UNIQUE,  -- in the ledger, over all lanes
    body_hash   bytea NOT NULL,
    head        bytea NOT NULL,                     -- the hash of the lane's chain, this report included
    lines       integer NOT NULL CHECK (lines >= 0),
    recorded_at timestamptz NOT NULL,
    PRIMARY KEY (epoch, lane, seq),
    FOREIGN KEY (epoch, lane) REFERENCES lane
);
CREATE TRIGGER report_is_append_only BEFORE UPDATE OR DELETE ON report
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER report_is_never_truncated BEFORE TRUNCATE ON report
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- Reports, or parts of them, that were not booked and are kept whole for people to judge.
CREATE TABLE quarantine (
    epoch       bigint NOT NULL,
    lane        integer NOT NULL,
    seq         bigint NOT NULL,
    quota       text NOT NULL,                      -- empty, like `period`: the whole batch
    period      text NOT NULL,
    reason      text NOT NULL,
    evidence    jsonb NOT NULL,
    recorded_at timestamptz NOT NULL,
    PRIMARY KEY (epoch, lane, seq, quota, period)
);
-- Batches that show that the ledger is behind.
CREATE INDEX quarantine_of_lanes ON quarantine (epoch, lane, seq) WHERE quota = '';


-- === Transfers =======================================================================================================

-- Every movement of units. One row carries both sides, so that the books balance by construction.
CREATE TABLE transfer (
    id            bigint GENERATED ALWAYS AS IDENTITY,
    period        text NOT NULL,                    -- in which it is booked
    charge_period text NOT NULL,                    -- in which the units were used: earlier, if they came late
    quota         text NOT NULL,
    src           text NOT NULL CONSTRAINT transfer_src_is_known CHECK (src IN (
        'funding', 'unallocated', 'outstanding', 'consumed', 'suspense', 'estimated', 'written_off', 'overage',
        'suspense_carried', 'suspense_carried_in', 'suspense_carried_out', 'correction', 'adjustment',
        'soft_cap_extension', 'carried_over_in', 'carried_over_out')),
    dst           text NOT NULL CONSTRAINT transfer_dst_is_known CHECK (dst IN (
        'funding', 'unallocated', 'outstanding', 'consumed', 'suspense', 'estimated', 'written_off', 'overage',
        'suspense_carried', 'suspense_carried_in', 'suspense_carried_out', 'correction', 'adjustment',
        'soft_cap_extension', 'carried_over_in', 'carried_over_out')),
    units         bigint NOT NULL CONSTRAINT transfer_units_are_positive CHECK (units > 0),
    cause         text NOT NULL,
    region        text,
    epoch         bigint,
    -- A transfer of a report names the report, the line, and the part of a line that drains several accounts.
    lane          integer,
    seq           bigint,
    line          integer,
    part          integer NOT NULL DEFAULT 0,
    -- A movement that the coordinator makes by itself has an id that follows from what is moved.
    movement_id   uuid,
    -- Usage has the minute in which it happened, and the dimensions by which finance groups it.
    window_at     timestamptz,
    dimensions    jsonb,
    reverses      bigint,                           -- always NULL: chains and seals hash it
    recorded_at   timestamptz NOT NULL,
    PRIMARY KEY (period, id),
    CONSTRAINT transfer_has_two_sides CHECK (src <> dst),
    -- A transfer is either a report's or the coordinator's own; each is booked once.
    CONSTRAINT transfer_has_one_origin CHECK ((movement_id IS NULL) = (seq IS NOT NULL)),
    CONSTRAINT transfer_of_report_is_named CHECK (
        seq IS NULL OR (epoch IS NOT NULL AND lane IS NOT NULL AND line IS NOT NULL)),
    -- Usage without a time or a region would be found by no query, and billed by no invoice.
    CONSTRAINT transfer_of_usage_is_placed CHECK (
        dst <> 'consumed' OR (window_at IS NOT NULL AND region IS NOT NULL)),
    -- The report comes first: it also finds the transfers of a report.
    CONSTRAINT transfer_of_report UNIQUE (epoch, lane, seq, line, part, period)
) PARTITION BY LIST (period);
-- Partial, because a report's transfers have no movement: a constraint would hold a NULL for each of them.
CREATE UNIQUE INDEX transfer_of_movement ON transfer (movement_id, part, period) WHERE movement_id IS NOT NULL;
CREATE INDEX transfer_usage ON transfer (window_at, quota) INCLUDE (region, units) WHERE dst = 'consumed';
-- The transfers that belong to no report, in the order in which a seal hashes them.
CREATE INDEX transfer_of_no_report ON transfer (id) WHERE seq IS NULL;

-- For each row, because only row triggers are handed down to partitions, and a statement may name a partition.
CREATE TRIGGER transfer_is_append_only BEFORE UPDATE OR DELETE ON transfer
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER transfer_is_never_truncated BEFORE TRUNCATE ON transfer
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- A period has a partition of the transfers: "transfer_2026-11". It is created as a table of its own and attached then,
-- because attaching waits for no reader and no writer of the other partitions.
CREATE FUNCTION create_partition(home text, period text) RETURNS void LANGUAGE plpgsql
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

CREATE FUNCTION create_partition_of_period() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('SELECT %I.create_partition($1, $2)', TG_TABLE_SCHEMA) USING TG_TABLE_SCHEMA, NEW.id;
    RETURN NULL;
END $$;
CREATE TRIGGER period_has_a_partition AFTER INSERT ON period FOR EACH ROW EXECUTE FUNCTION create_partition_of_period();

-- What a foreign key to `pool` would check for each row is checked once for a statement: that is a third of the cost of
-- a transfer (docs/adr/0011). Whatever inserts a transfer has locked its pool.
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

CREATE FUNCTION refuse_change_of_used_pool() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM transfer WHERE transfer.quota = OLD.quota AND transfer.period = OLD.period) THEN
        RAISE foreign_key_violation
            USING MESSAGE = format('the ledger is append-only: %s on a pool that has transfers is refused', TG_OP);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER pool_of_transfers_stays AFTER UPDATE OF quota, period OR DELETE ON pool
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_used_pool();
CREATE TRIGGER pool_is_never_truncated BEFORE TRUNCATE ON pool
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();


-- === Usage ===========================================================================================================

-- Usage by the hour and by the day (UTC), by everything that finance groups it by. A trigger adds each transfer to both
-- tables. Whatever adds to a pool has locked it, and so the pool's rows here: their key has both parts of the pool's.
CREATE TABLE usage_hour (
    begins_at     timestamptz NOT NULL,
    period        text NOT NULL,                    -- in which the usage is booked
    charge_period text NOT NULL,                    -- in which it happened
    quota         text NOT NULL,
    name          text NOT NULL,                    -- the quota, without its subject
    tenant        text,                             -- the pool's, or of a quota without tenants the usage line's
    region        text NOT NULL,
    policy        text,
    route_class   text,
    api_key       text,                             -- a hash of the key
    degraded      text,                             -- how it was admitted while the store was away
    counted_as    text,                             -- `overage`: beyond the limit
    units         bigint NOT NULL CONSTRAINT usage_hour_units_are_positive CHECK (units > 0),
    CONSTRAINT usage_hour_row_is_unique UNIQUE NULLS NOT DISTINCT
        (tenant, begins_at, quota, period, region, policy, charge_period, route_class, api_key, degraded, counted_as)
) WITH (fillfactor = 80);
CREATE INDEX usage_hour_by_time ON usage_hour (begins_at);
CREATE INDEX usage_hour_by_period ON usage_hour (period, tenant);

CREATE TABLE usage_day (
    begins_at     timestamptz NOT NULL,             -- midnight in UTC
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
    units         bigint NOT NULL CONSTRAINT usage_day_units_are_positive CHECK (units > 0),
    CONSTRAINT usage_day_row_is_unique UNIQUE NULLS NOT DISTINCT
        (tenant, begins_at, quota, period, region, policy, charge_period, route_class, api_key, degraded, counted_as)
) WITH (fillfactor = 80);
CREATE INDEX usage_day_by_time ON usage_day (begins_at);
CREATE INDEX usage_day_by_period ON usage_day (period, tenant);

-- Lines that are alike are added up first, and only the sums are taken apart and joined with their pools. Hours and
-- days of UTC are bins of equal length, for which no table of time zones is needed.
CREATE FUNCTION roll_up_usage() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
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
        INSERT INTO usage_hour AS kept (begins_at, period, charge_period, quota, name, tenant, region, policy,
            route_class, api_key, degraded, counted_as, units)
        SELECT begins_at, period, charge_period, quota, name, tenant, region, policy,
            route_class, api_key, degraded, counted_as, units FROM hours
        ON CONFLICT ON CONSTRAINT usage_hour_row_is_unique DO UPDATE SET units = kept.units + excluded.units
    )
    INSERT INTO usage_day AS kept (begins_at, period, charge_period, quota, name, tenant, region, policy,
        route_class, api_key, degraded, counted_as, units)
    SELECT date_bin('1 day', begins_at, '2000-01-01 00:00Z'), period, charge_period, quota, name, tenant, region,
        policy, route_class, api_key, degraded, counted_as, sum(units)::bigint
    FROM hours GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
    ON CONFLICT ON CONSTRAINT usage_day_row_is_unique DO UPDATE SET units = kept.units + excluded.units;
    RETURN NULL;
END $$;
-- Whatever schema this runs in.
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION roll_up_usage() SET search_path = pg_catalog, %I, pg_temp', current_schema());
END $$;
CREATE TRIGGER transfer_is_rolled_up AFTER INSERT ON transfer REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION roll_up_usage();

-- Usage with labels once more, by the hour and by its labels. Lines without labels add nothing to it, so that they cost
-- nothing, and questions that name no label read the tables above.
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

-- The sets of labels by which usage of a quota key is told apart in a period: a bounded number.
CREATE TABLE label_set (
    quota  text NOT NULL,
    period text NOT NULL,
    labels text NOT NULL,
    PRIMARY KEY (period, quota, labels)
);


-- === Corrections =====================================================================================================

-- What became, in a later period, of a lease whose own period is closed. It balances like a lease.
CREATE TABLE correction (
    epoch                bigint NOT NULL REFERENCES region_epoch,
    quota                text NOT NULL,
    charge_period        text NOT NULL,  -- the lease's own period
    period               text NOT NULL,  -- the later one, in which this is booked
    region               text NOT NULL REFERENCES region,
    -- Where units came from.
    suspense_carried_in  bigint NOT NULL DEFAULT 0 CHECK (suspense_carried_in >= 0),
    correction           bigint NOT NULL DEFAULT 0 CHECK (correction >= 0),
    -- Where units are.
    suspense_carried     bigint NOT NULL DEFAULT 0 CHECK (suspense_carried >= 0),
    suspense_carried_out bigint NOT NULL DEFAULT 0 CHECK (suspense_carried_out >= 0),
    estimated            bigint NOT NULL DEFAULT 0 CHECK (estimated >= 0),
    consumed             bigint NOT NULL DEFAULT 0 CHECK (consumed >= 0),
    written_off          bigint NOT NULL DEFAULT 0 CHECK (written_off >= 0),
    -- Of what the closed period had estimated and written off, the units that evidence has replaced since.
    replaced             bigint NOT NULL DEFAULT 0 CHECK (replaced >= 0),
    recovered            bigint NOT NULL DEFAULT 0 CHECK (recovered >= 0),
    overage_used         bigint NOT NULL DEFAULT 0,  -- of `consumed`, what is beyond the limit of its own period
    -- The region's own totals, as its last report stated them.
    region_consumed      bigint NOT NULL DEFAULT 0 CHECK (region_consumed >= 0),
    region_returned      bigint NOT NULL DEFAULT 0 CHECK (region_returned >= 0),
    quarantined          boolean NOT NULL DEFAULT false,  -- nothing more is booked until people have decided
    PRIMARY KEY (epoch, quota, charge_period, period),
    FOREIGN KEY (quota, period) REFERENCES pool,
    CONSTRAINT correction_is_of_another_period CHECK (charge_period <> period),
    CONSTRAINT correction_balances CHECK (
        suspense_carried_in + correction
        = suspense_carried + suspense_carried_out + estimated + consumed + written_off),
    CONSTRAINT correction_overage_was_consumed CHECK (overage_used >= 0 AND overage_used <= greatest(consumed, 0))
);
CREATE INDEX correction_by_pool ON correction (quota, period);
CREATE INDEX correction_by_charge_period ON correction (quota, charge_period);
CREATE INDEX correction_with_suspense ON correction (epoch) WHERE suspense_carried > 0;

-- How people end suspense that no evidence ends, or go on with a lane whose ledger was restored to an older state. One
-- person proposes it and another approves it.
CREATE TABLE resolution (
    id          uuid PRIMARY KEY,
    epoch       bigint NOT NULL CONSTRAINT resolution_of_an_epoch REFERENCES region_epoch,
    -- Of a lease: no foreign key, because there never was a lease for some of what comes late.
    quota       text,
    period      text,
    -- Of a lane: it goes on with this batch.
    lane        integer,
    seq         bigint,
    kind        text NOT NULL CHECK (kind IN ('write_off', 'charge', 'estimate', 'unattributed', 'rebase')),
    suspense    bigint NOT NULL CHECK (suspense >= 0),  -- as it was when this was proposed
    charged     bigint NOT NULL,
    reason      text NOT NULL CHECK (reason <> ''),
    proposed_by uuid NOT NULL,                      -- the token
    proposed_at timestamptz NOT NULL,
    approved_by uuid,
    approved_at timestamptz,
    bulk        uuid,                               -- the proposal of many that this is one of
    CONSTRAINT resolution_charge_is_suspense CHECK (charged >= 0 AND charged <= suspense),
    CONSTRAINT resolution_is_approved_whole CHECK ((approved_by IS NULL) = (approved_at IS NULL)),
    CONSTRAINT resolution_has_two_people CHECK (approved_by <> proposed_by),
    CONSTRAINT resolution_is_of_a_lease_or_a_lane CHECK (
        CASE kind WHEN 'rebase' THEN quota IS NULL AND period IS NULL AND lane IS NOT NULL AND seq IS NOT NULL
        ELSE quota IS NOT NULL AND period IS NOT NULL AND lane IS NULL AND seq IS NULL END),
    CONSTRAINT resolution_of_a_lane FOREIGN KEY (epoch, lane) REFERENCES lane
);
-- One open proposal for each lease and for each lane: two could both be right for the same units.
CREATE UNIQUE INDEX resolution_open ON resolution (epoch, quota, period, lane) NULLS NOT DISTINCT
    WHERE approved_at IS NULL;
CREATE INDEX resolution_of_bulk ON resolution (bulk, id) WHERE bulk IS NOT NULL;

-- What was approved has moved units, so it can no more be changed than the ledger.
CREATE FUNCTION refuse_change_of_approved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'resolution % is approved: % is refused', OLD.id, TG_OP;
END $$;
CREATE TRIGGER resolution_stands_once_approved BEFORE UPDATE OR DELETE ON resolution
    FOR EACH ROW WHEN (OLD.approved_at IS NOT NULL) EXECUTE FUNCTION refuse_change_of_approved();
CREATE TRIGGER resolution_is_never_truncated BEFORE TRUNCATE ON resolution
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- Credits, debits and write-offs that people book. One person proposes them and another approves them.
CREATE TABLE adjustment (
    id           uuid PRIMARY KEY,                  -- and the id of its movement
    quota        text NOT NULL,
    period       text NOT NULL,                     -- that it is about
    kind         text NOT NULL CHECK (kind IN ('credit', 'debit', 'write_off')),
    units        bigint NOT NULL CHECK (units > 0),
    reason       text NOT NULL CHECK (reason <> ''),
    document     text NOT NULL CHECK (document <> ''),  -- a reference to what it rests on, such as a ticket
    proposed_by  uuid NOT NULL,                     -- the token
    proposed_at  timestamptz NOT NULL,
    expires_at   timestamptz NOT NULL,
    approved_by  uuid,
    approved_at  timestamptz,
    booked_in    text,                              -- a period: a later one, if the units cannot be moved in `period`
    withdrawn_by uuid,
    withdrawn_at timestamptz,
    FOREIGN KEY (quota, booked_in) REFERENCES pool,
    CONSTRAINT adjustment_has_two_people CHECK (approved_by <> proposed_by),
    CONSTRAINT adjustment_is_approved_whole CHECK (num_nonnulls(approved_by, approved_at, booked_in) IN (0, 3)),
    CONSTRAINT adjustment_is_withdrawn_whole CHECK (num_nonnulls(withdrawn_by, withdrawn_at) IN (0, 2)),
    CONSTRAINT adjustment_ends_once CHECK (num_nonnulls(approved_at, withdrawn_at) < 2),
    CONSTRAINT adjustment_is_approved_in_time CHECK (approved_at <= expires_at)
);
-- A reconciliation counts those of a period, and a write-off is bounded by those of its pool.
CREATE INDEX adjustment_of_books ON adjustment (booked_in) WHERE booked_in IS NOT NULL;
CREATE INDEX adjustment_of_pool ON adjustment (quota, period);
CREATE INDEX adjustment_by_time ON adjustment (proposed_at, id);

CREATE FUNCTION refuse_change_of_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'adjustment % has ended: % is refused', OLD.id, TG_OP;
END $$;
CREATE TRIGGER adjustment_stands_once_ended BEFORE UPDATE OR DELETE ON adjustment
    FOR EACH ROW WHEN (OLD.approved_at IS NOT NULL OR OLD.withdrawn_at IS NOT NULL)
    EXECUTE FUNCTION refuse_change_of_ended();
CREATE TRIGGER adjustment_is_never_truncated BEFORE TRUNCATE ON adjustment
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();


-- === Closed periods ==================================================================================================

-- A closed period stays as it is, whatever the code does: triggers refuse changes of its pools, leases and corrections.
-- They look at a whole statement, whose rows are in the transition table `changed`.
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

-- An update is looked at as it was and as it is, because a row could be moved out of a closed period or into one.
CREATE TRIGGER pool_is_not_added_to_a_closed_period AFTER INSERT ON pool
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER pool_is_not_changed_in_a_closed_period AFTER UPDATE ON pool
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER pool_is_not_moved_to_a_closed_period AFTER UPDATE ON pool
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER pool_is_not_deleted_from_a_closed_period AFTER DELETE ON pool
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();

CREATE TRIGGER lease_is_not_added_to_a_closed_period AFTER INSERT ON lease
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER lease_is_not_changed_in_a_closed_period AFTER UPDATE ON lease
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER lease_is_not_moved_to_a_closed_period AFTER UPDATE ON lease
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER lease_is_not_deleted_from_a_closed_period AFTER DELETE ON lease
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();

CREATE TRIGGER correction_is_not_added_to_a_closed_period AFTER INSERT ON correction
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER correction_is_not_changed_in_a_closed_period AFTER UPDATE ON correction
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER correction_is_not_moved_to_a_closed_period AFTER UPDATE ON correction
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();
CREATE TRIGGER correction_is_not_deleted_from_a_closed_period AFTER DELETE ON correction
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed();

-- The partition of the transfers gets a trigger of its own at the close, so that open periods do not pay for it.
-- Creating a trigger waits for writers of the partition, and for no reader.
CREATE FUNCTION refuse_transfer() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'period % is closed: % on transfer is refused', NEW.period, TG_OP;
END $$;
CREATE FUNCTION refuse_transfers_of_closed_period() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('CREATE TRIGGER transfer_is_of_a_closed_period BEFORE INSERT ON %I.%I
        FOR EACH ROW EXECUTE FUNCTION %I.refuse_transfer()', TG_TABLE_SCHEMA, 'transfer_' || NEW.id, TG_TABLE_SCHEMA);
    RETURN NULL;
END $$;
CREATE TRIGGER period_closes_its_partition AFTER UPDATE ON period
    FOR EACH ROW WHEN (OLD.state <> 'closed' AND NEW.state = 'closed')
    EXECUTE FUNCTION refuse_transfers_of_closed_period();

CREATE FUNCTION refuse_reopening() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'period % is %: % is refused', OLD.id, OLD.state, TG_OP;
END $$;
CREATE TRIGGER period_stays_closed BEFORE UPDATE OR DELETE ON period
    FOR EACH ROW WHEN (OLD.state = 'closed') EXECUTE FUNCTION refuse_reopening();
CREATE TRIGGER period_never_opens_again BEFORE UPDATE ON period
    FOR EACH ROW WHEN (OLD.state = 'closing' AND NEW.state = 'open') EXECUTE FUNCTION refuse_reopening();


-- === Limits ==========================================================================================================

-- One row: the number grows with every change that agents must hear of. A restored database repeats numbers, but never
-- a stamp: a number and a stamp together name one state.
CREATE TABLE policy_version (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    version  bigint NOT NULL,
    stamp    uuid NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO policy_version (version) VALUES (0);

-- The limits documents that people applied.
CREATE TABLE limits_version (
    version    bigint PRIMARY KEY,                  -- the policy version with which it came into force
    document   jsonb NOT NULL,
    applied_at timestamptz NOT NULL,
    applied_by text NOT NULL
);

-- The plan of each tenant.
CREATE TABLE subscription (
    tenant     text PRIMARY KEY CHECK (length(tenant) BETWEEN 1 AND 256),
    plan       text NOT NULL,
    began_at   timestamptz NOT NULL DEFAULT now(),  -- whose anniversaries a calendar may follow
    changed_at timestamptz NOT NULL
);

-- What is registered of a tenant: its name, its ids in other systems, its address and its time zone.
CREATE TABLE tenant (
    id         text PRIMARY KEY CHECK (length(id) BETWEEN 1 AND 256),
    profile    jsonb NOT NULL,
    changed_at timestamptz NOT NULL
);

-- Another limit for some of a quota's subjects, for a while. The newest that is in force counts.
CREATE TABLE limit_override (
    id          uuid PRIMARY KEY,
    key         text NOT NULL,                      -- quota and subject as a quota key, fields in alphabetical order
    quota       text NOT NULL,
    subject     jsonb NOT NULL,
    value       jsonb NOT NULL,                     -- units, or a rate as in the limits document
    valid_from  timestamptz NOT NULL,
    valid_until timestamptz,                        -- NULL: until it is deleted
    reason      text NOT NULL CHECK (reason <> ''),
    created_at  timestamptz NOT NULL,
    created_by  text NOT NULL,
    CONSTRAINT limit_override_has_a_length CHECK (valid_until > valid_from)
);
CREATE INDEX limit_override_by_key ON limit_override (key, id);

-- Subjects that are denied in all regions, whatever their quotas say.
CREATE TABLE block (
    field       text NOT NULL CHECK (field IN ('tenant', 'user', 'api_key', 'ip')),
    value       text NOT NULL CHECK (length(value) BETWEEN 1 AND 256),
    reason      text NOT NULL CHECK (reason <> ''),
    created_at  timestamptz NOT NULL,
    created_by  text NOT NULL,
    valid_until timestamptz,                        -- NULL: until it is deleted
    PRIMARY KEY (field, value)
);

-- One row, as `policy_version`: it grows with every change of the block list.
CREATE TABLE block_version (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    version  bigint NOT NULL,
    stamp    uuid NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO block_version (version) VALUES (0);

-- Keys of rates that people have reset, kept while a region may have to catch up.
CREATE TABLE reset (
    number     bigint PRIMARY KEY CHECK (number > 0),  -- milliseconds since 1970, or one more than the last
    quota      text NOT NULL,
    subject    jsonb NOT NULL,
    keys       text[] NOT NULL CHECK (cardinality(keys) > 0),
    reason     text NOT NULL CHECK (reason <> ''),
    created_at timestamptz NOT NULL,
    created_by text NOT NULL
);
CREATE INDEX reset_by_age ON reset (created_at);


-- === Rebalancing =====================================================================================================

-- What people set for a region's part of a quota. What is NULL follows from the region's weight and from demand.
CREATE TABLE region_setting (
    key        text NOT NULL,                       -- quota and subject as a quota key, fields in alphabetical order
    region     text NOT NULL REFERENCES region,
    weight     bigint CHECK (weight BETWEEN 0 AND 1000000),
    floor      jsonb,                               -- units of the period, or a rate as in the limits document
    ceiling    jsonb,                               -- likewise; a region whose floor is its ceiling is pinned
    changed_at timestamptz NOT NULL,
    changed_by text NOT NULL,
    PRIMARY KEY (key, region),
    CONSTRAINT region_setting_is_not_empty CHECK (num_nonnulls(weight, floor, ceiling) > 0)
);

-- An order of people to move units between regions, or to drain a region.
CREATE TABLE rebalance (
    id         uuid PRIMARY KEY,
    -- Grows with each rebalance: a preview that names an older one is refused, because others changed something since.
    version    bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    mode       text NOT NULL CHECK (mode IN ('move', 'weigh', 'even_out', 'drain', 'restore')),
    request    jsonb NOT NULL,
    plan       jsonb NOT NULL,                      -- what there was, what there should be, and what is not possible
    region     text REFERENCES region,              -- that is drained or restored
    recalled   bigint NOT NULL CHECK (recalled >= 0),  -- by a drain: the units outstanding when it began
    returned   bigint NOT NULL DEFAULT 0,           -- of `recalled`, the units that are accounted for
    state      text NOT NULL CHECK (state IN ('running', 'done', 'partial', 'cancelled')),
    reason     text,                                -- why it ended before it was done
    created_at timestamptz NOT NULL,
    created_by text NOT NULL,
    ended_at   timestamptz,
    CONSTRAINT rebalance_has_an_end CHECK ((state = 'running') = (ended_at IS NULL))
);
-- A region is drained or restored by one rebalance at a time.
CREATE UNIQUE INDEX rebalance_of_region ON rebalance (region) WHERE state = 'running';

-- Units that a rebalance moves from one region to another, and how far they have come.
CREATE TABLE rebalance_move (
    rebalance uuid NOT NULL REFERENCES rebalance,
    number    integer NOT NULL CHECK (number > 0),
    quota     text NOT NULL,
    period    text NOT NULL,
    source    text NOT NULL REFERENCES region,
    target    text REFERENCES region,               -- NULL: back to the pool
    units     bigint NOT NULL CHECK (units > 0),
    returned  bigint NOT NULL DEFAULT 0,            -- by the source
    regranted bigint NOT NULL DEFAULT 0 CHECK (regranted >= 0),  -- to the target
    reason    text,                                 -- why it ended before all units were moved
    ended_at  timestamptz,
    PRIMARY KEY (rebalance, number),
    FOREIGN KEY (quota, period) REFERENCES pool,
    CONSTRAINT rebalance_move_has_another_target CHECK (target <> source),
    CONSTRAINT rebalance_move_returns_its_units CHECK (returned <= units),
    CONSTRAINT rebalance_move_regrants_returns CHECK (regranted <= returned)
);
CREATE INDEX rebalance_move_open ON rebalance_move (quota, period) WHERE ended_at IS NULL;

-- What is kept for a region after a move, like a floor, until a time.
CREATE TABLE floor_hold (
    quota     text NOT NULL,
    period    text NOT NULL,
    region    text NOT NULL REFERENCES region,
    units     bigint NOT NULL CHECK (units > 0),    -- of the period, those that are spent included
    until     timestamptz NOT NULL,
    rebalance uuid NOT NULL REFERENCES rebalance,
    PRIMARY KEY (quota, period, region),
    FOREIGN KEY (quota, period) REFERENCES pool
);


-- === Shared limits ===================================================================================================

-- The shares of rates and slots that may be in force (docs/adr/0024). It is no ledger and is written with every report,
-- so it is not logged: a coordinator that finds no row starts again from what regions report.
CREATE UNLOGGED TABLE shared_limit (
    quota       text PRIMARY KEY,
    state       bytea NOT NULL,                     -- MessagePack
    reported_at timestamptz NOT NULL
) WITH (fillfactor = 50);


-- === Proof ===========================================================================================================

-- A lock that makes a sealed position final. Whatever books takes a weak lock on this table before its first position
-- is handed out, and holds it to the end of its transaction; these locks do not hinder each other. A sealer takes the
-- strong lock: when it has it, every position that was handed out is committed or rolled back.
CREATE TABLE position_gate ();

CREATE FUNCTION pass_position_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    LOCK TABLE position_gate IN ROW SHARE MODE;
    RETURN NULL;
END $$;
-- Before the statement, and so before any of its rows is given a number.
CREATE TRIGGER transfer_passes_the_gate BEFORE INSERT ON transfer
    FOR EACH STATEMENT EXECUTE FUNCTION pass_position_gate();
CREATE TRIGGER report_passes_the_gate BEFORE INSERT ON report
    FOR EACH STATEMENT EXECUTE FUNCTION pass_position_gate();

-- A hash over the ledger up to a position. Each seal hashes the one before, and what came since.
CREATE TABLE seal (
    number         bigint PRIMARY KEY CHECK (number > 0),
    previous       bytea NOT NULL,                  -- the hash of the seal before
    position       bigint NOT NULL CHECK (position >= 0),   -- of the last report
    transfer       bigint NOT NULL CHECK (transfer >= 0),   -- the id of the last transfer
    audit          bigint NOT NULL CHECK (audit >= 0),      -- the id of the last audit entry
    -- Since the seal before: the numbers and hashes of reports, of transfers without a report, and of audit entries.
    reports        bigint NOT NULL CHECK (reports >= 0),
    reports_hash   bytea NOT NULL,
    movements      bigint NOT NULL CHECK (movements >= 0),
    movements_hash bytea NOT NULL,
    entries        bigint NOT NULL CHECK (entries >= 0),
    entries_hash   bytea NOT NULL,
    balances       jsonb NOT NULL,                  -- the trial balance of each period with transfers since
    sealed_at      timestamptz NOT NULL UNIQUE,
    hash           bytea NOT NULL UNIQUE
);
CREATE TRIGGER seal_is_append_only BEFORE UPDATE OR DELETE ON seal
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER seal_is_never_truncated BEFORE TRUNCATE ON seal
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- Requests to verify the ledger, and their results.
CREATE TABLE verification (
    id           uuid PRIMARY KEY,
    requested_by uuid NOT NULL,                 -- the token
    requested_at timestamptz NOT NULL,
    kept_seals   jsonb NOT NULL DEFAULT '[]',   -- seals that the auditor kept elsewhere, to be compared
    finished_at  timestamptz,
    result       jsonb,
    CONSTRAINT verification_is_finished_whole CHECK ((finished_at IS NULL) = (result IS NULL))
);
CREATE INDEX verification_to_do ON verification (requested_at) WHERE result IS NULL;


-- === Exports =========================================================================================================

-- A request for every line of usage up to a seal, in the order of the ledger: the same bytes whenever it is read.
CREATE TABLE export (
    id            uuid PRIMARY KEY,
    period        text NOT NULL REFERENCES period,
    tenant        text,                           -- NULL: all tenants
    format        text NOT NULL CONSTRAINT export_format_is_known CHECK (format IN ('csv', 'ndjson', 'parquet')),
    seal          bigint NOT NULL,                -- its number
    is_final      boolean NOT NULL,               -- the period is closed, and the seal covers all of it
    requested_by  uuid NOT NULL,                  -- the token
    requested_at  timestamptz NOT NULL,
    requesters    uuid[] NOT NULL DEFAULT '{}',   -- the tokens that requested it and did not cancel
    cancelled_at  timestamptz,
    -- Progress. A coordinator that takes the work over begins a new attempt.
    attempt       int NOT NULL DEFAULT 0,
    last_transfer bigint NOT NULL DEFAULT 0,      -- the last transfer that was counted
    rows_expected bigint,                         -- NULL: not counted yet
    rows          bigint NOT NULL DEFAULT 0,
    bytes         bigint NOT NULL DEFAULT 0,
    -- The manifest.
    finished_at   timestamptz,
    sha256        bytea,
    resume_points jsonb,                          -- [byte, transfer]: where a download may go on
    expires_at    timestamptz,                    -- of its parts; NULL: it has none, and is read from the ledger
    CONSTRAINT export_is_finished_whole CHECK (
        (finished_at IS NULL) = (sha256 IS NULL) AND (finished_at IS NULL) = (resume_points IS NULL))
);
CREATE INDEX export_to_do ON export (requested_at) WHERE finished_at IS NULL;

-- The bytes of a Parquet export, which cannot be made again from any place in the ledger.
CREATE TABLE export_part (
    export    uuid NOT NULL REFERENCES export,
    -- The offset in bytes.
    starts_at bigint NOT NULL CONSTRAINT export_part_offset_is_not_negative CHECK (starts_at >= 0),
    body      bytea NOT NULL CONSTRAINT export_part_has_bytes CHECK (octet_length(body) > 0),
    PRIMARY KEY (export, starts_at)
);
-- Parquet is compressed already.
ALTER TABLE export_part ALTER COLUMN body SET STORAGE EXTERNAL;


-- === Archives ========================================================================================================

-- Closed periods whose lines are in files, or are being written there.
CREATE TABLE archive (
    period          text PRIMARY KEY REFERENCES period,
    requested_by    uuid NOT NULL,                  -- the token
    requested_at    timestamptz NOT NULL,
    -- Progress. Each attempt writes into a folder of its own.
    attempt         integer NOT NULL DEFAULT 0,
    rows            bigint NOT NULL DEFAULT 0,
    bytes           bigint NOT NULL DEFAULT 0,
    failure         text,                           -- why it ended without an archive, until it is requested again
    -- The record of a complete archive. Only archive_transfers() writes it.
    location        text,
    folder          text,                           -- of the archive, below the place where all of them are
    manifest_sha256 bytea,
    transfers       bigint,                         -- the number of transfers that left the database
    first_position  bigint,
    last_position   bigint,                         -- no report after it has lines in the period
    last_transfer   bigint,
    usage_sha256    bytea,                          -- over the period's rows of usage_hour and usage_day
    archived_at     timestamptz,
    CONSTRAINT archive_is_recorded_whole CHECK (num_nonnulls(location, folder, manifest_sha256, transfers,
        first_position, last_position, last_transfer, usage_sha256, archived_at) IN (0, 9))
);
CREATE TRIGGER archive_stands_once_recorded BEFORE UPDATE OR DELETE ON archive
    FOR EACH ROW WHEN (OLD.archived_at IS NOT NULL) EXECUTE FUNCTION refuse_change();
CREATE TRIGGER archive_is_never_truncated BEFORE TRUNCATE ON archive
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- The sums of the transfers that left the database, in the terms of a reconciliation.
CREATE TABLE archived_sum (
    period        text NOT NULL REFERENCES period,
    charge_period text NOT NULL,
    quota         text NOT NULL,
    epoch         bigint NOT NULL,
    lane          integer NOT NULL,
    src           text NOT NULL,
    dst           text NOT NULL,
    cause         text NOT NULL,
    units         numeric NOT NULL CONSTRAINT archived_sum_units_are_positive CHECK (units > 0),
    transfers     bigint NOT NULL CONSTRAINT archived_sum_has_transfers CHECK (transfers > 0),
    PRIMARY KEY (period, quota, epoch, lane, charge_period, src, dst, cause)
);
CREATE TRIGGER archived_sum_is_append_only BEFORE UPDATE OR DELETE ON archived_sum
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER archived_sum_is_never_truncated BEFORE TRUNCATE ON archived_sum
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- Remove the transfers of reports of a closed period from its partition, and record their archive (docs/adr/0078).
-- Movements stay, because seals hash them one by one. Whatever reads transfers and archives together holds `archive`
-- meanwhile. Sums come first: they take long, and no lock yet.
CREATE FUNCTION archive_transfers(recorded archive) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    partition text := 'transfer_' || recorded.period;
BEGIN
    IF NOT EXISTS (SELECT FROM period WHERE id = recorded.period AND state = 'closed') THEN
        RAISE EXCEPTION 'period % is not closed: its transfers stay', recorded.period;
    END IF;
    INSERT INTO archived_sum (period, charge_period, quota, epoch, lane, src, dst, cause, units, transfers)
        SELECT period, charge_period, quota, epoch, lane, src, dst, cause, sum(units), count(*) FROM transfer
        WHERE period = recorded.period AND seq IS NOT NULL GROUP BY 1, 2, 3, 4, 5, 6, 7, 8;
    IF (SELECT coalesce(sum(transfers), 0) FROM archived_sum WHERE period = recorded.period) <> recorded.transfers THEN
        RAISE EXCEPTION 'the archive of period % has another number of transfers: they stay', recorded.period;
    END IF;
    IF (SELECT max(id) FROM transfer WHERE period = recorded.period) > (SELECT max(transfer) FROM seal) THEN
        RAISE EXCEPTION 'period % is not sealed: its transfers stay', recorded.period;
    END IF;
    LOCK TABLE archive IN ACCESS EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM export WHERE period = recorded.period AND finished_at IS NULL AND cancelled_at IS NULL) THEN
        RAISE EXCEPTION 'an export of period % is being made: its transfers stay', recorded.period;
    END IF;
    UPDATE archive SET location = recorded.location, folder = recorded.folder, transfers = recorded.transfers,
        manifest_sha256 = recorded.manifest_sha256, first_position = recorded.first_position,
        last_position = recorded.last_position, last_transfer = recorded.last_transfer,
        usage_sha256 = recorded.usage_sha256, archived_at = recorded.archived_at
        WHERE period = recorded.period AND attempt = recorded.attempt AND archived_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'attempt % to archive period % has ended: its transfers stay', recorded.attempt, recorded.period;
    END IF;
    EXECUTE format('CREATE TEMPORARY TABLE movement_to_keep ON COMMIT DROP AS SELECT * FROM %I WHERE seq IS NULL',
        partition);
    EXECUTE format('ALTER TABLE %I DISABLE TRIGGER USER', partition);
    EXECUTE format('TRUNCATE %I', partition);
    EXECUTE format('INSERT INTO %I OVERRIDING SYSTEM VALUE SELECT * FROM pg_temp.movement_to_keep', partition);
    EXECUTE format('ALTER TABLE %I ENABLE TRIGGER USER', partition);
END $$;
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION archive_transfers SET search_path = pg_catalog, %I, pg_temp', current_schema());
END $$;
REVOKE EXECUTE ON FUNCTION archive_transfers FROM PUBLIC;


-- === Webhooks ========================================================================================================

CREATE TABLE webhook (
    id              uuid PRIMARY KEY,
    url             text NOT NULL CHECK (url ~ '^https?://'),
    events          text[] NOT NULL CHECK (cardinality(events) > 0),
    secret          text NOT NULL CHECK (secret <> ''),  -- in the clear, because it signs each delivery
    previous_secret text,                           -- signs as well, until `previous_until`
    previous_until  timestamptz,
    paused          boolean NOT NULL DEFAULT false,
    created_at      timestamptz NOT NULL,
    created_by      text NOT NULL,
    CONSTRAINT webhook_rotates_whole CHECK (num_nonnulls(previous_secret, previous_until) IN (0, 2))
);

-- Events. Each is written in the transaction that it tells of, if any webhook wants its kind.
CREATE TABLE outbox (
    id          uuid PRIMARY KEY,                   -- by which receivers know a repeated delivery
    kind        text NOT NULL CHECK (kind ~ '^[a-z_]+[.][a-z_]+$'),
    data        jsonb NOT NULL,
    occurred_at timestamptz NOT NULL,
    traceparent text                                -- of the request that it tells of, if that was traced
);
CREATE INDEX outbox_by_time ON outbox (occurred_at);

CREATE TABLE delivery (
    event           uuid NOT NULL REFERENCES outbox ON DELETE CASCADE,
    webhook         uuid NOT NULL REFERENCES webhook ON DELETE CASCADE,
    attempts        integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    next_attempt_at timestamptz NOT NULL,         -- until then a coordinator is delivering it, or it waits
    delivered_at    timestamptz,
    dead_at         timestamptz,                  -- given up, unless people replay it
    status          integer,                      -- of the last HTTP response
    error           text,                         -- of the last attempt
    PRIMARY KEY (event, webhook),
    CONSTRAINT delivery_ends_once CHECK (num_nonnulls(delivered_at, dead_at) < 2)
);
CREATE INDEX delivery_due ON delivery (next_attempt_at) WHERE delivered_at IS NULL AND dead_at IS NULL;
CREATE INDEX delivery_of_webhook ON delivery (webhook, event);

-- One row: which installation this database belongs to, and where that was confirmed. A copy sends no webhooks.
CREATE TABLE installation (
    only_row          boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    id                uuid NOT NULL,
    system_identifier text NOT NULL,              -- of the Postgres cluster; empty where it may not be read
    database_oid      bigint NOT NULL,
    addresses         text[] NOT NULL,            -- its addresses in coordinators' settings, or its name there
    confirmed_at      timestamptz NOT NULL
);


-- === Access ==========================================================================================================

CREATE TABLE token (
    id         uuid PRIMARY KEY,
    hash       bytea NOT NULL UNIQUE,               -- SHA-256 of 256 random bits; the token itself is stored nowhere
    scopes     text[] NOT NULL CHECK (cardinality(scopes) > 0),
    note       text NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL,
    revoked_at timestamptz
);

-- The callers of JWTs. They act under these ids, which follow from issuer and subject.
CREATE TABLE identity (
    id            uuid PRIMARY KEY,
    issuer        text NOT NULL CHECK (issuer <> ''),
    subject       text NOT NULL CHECK (subject <> ''),
    name          text NOT NULL,                    -- for people to read; empty if the issuer gives none
    first_seen_at timestamptz NOT NULL,
    CONSTRAINT identity_is_one_person UNIQUE (issuer, subject)
);

-- Who did what to what. An entry is written in the transaction that did it, so neither exists without the other.
CREATE TABLE audit (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    recorded_at timestamptz NOT NULL,
    actor       text NOT NULL CONSTRAINT audit_has_an_actor CHECK (actor <> ''),
    action      text NOT NULL CONSTRAINT audit_action_is_named CHECK (action ~ '^[a-z_]+[.][a-z_]+$'),
    object      text NOT NULL,
    request_id  text,                               -- of the HTTP request, if there was one
    details     jsonb NOT NULL
);
CREATE TRIGGER audit_is_append_only BEFORE UPDATE OR DELETE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER audit_is_never_truncated BEFORE TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER audit_passes_the_gate BEFORE INSERT ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION pass_position_gate();
-- The history of limits. By hashes, because a key may be longer than a B-tree takes.
CREATE INDEX audit_of_limits ON audit (id) WHERE action = 'limits.applied';
CREATE INDEX audit_of_subscriptions ON audit USING hash (object)
    WHERE action IN ('subscription.put', 'subscription.deleted');
CREATE INDEX audit_of_overrides ON audit
    USING hash (coalesce(details #>> '{subject,tenant}', details #>> '{was,subject,tenant}', ''))
    WHERE action IN ('override.added', 'override.deleted');

-- The response to the first request with an Idempotency-Key. Without a status, that request is still in progress.
CREATE TABLE idempotency_record (
    caller       uuid NOT NULL,                     -- the token
    key          text NOT NULL,
    request_hash bytea NOT NULL,
    claim        uuid NOT NULL,                     -- of the attempt that works on it, or did
    claimed_at   timestamptz NOT NULL,
    status       integer,
    headers      jsonb,
    body         bytea,
    PRIMARY KEY (caller, key)
);
CREATE INDEX idempotency_record_by_age ON idempotency_record (claimed_at);


-- === The decision log ================================================================================================

-- Decisions of agents: every denial, a sample of the admissions, and how many were lost. Nothing is computed from them.
-- The rows of a day (UTC) are a partition, which is dropped when its time is over: see coordinator/decision_log.
CREATE TABLE decision (
    at             timestamptz NOT NULL,            -- by the clock of the agent's machine
    id             uuid NOT NULL,                   -- its batch, and its place there: a batch is stored once
    tenant         text NOT NULL,                   -- empty if the request named none
    region         text NOT NULL,
    agent          text NOT NULL,
    outcome        text NOT NULL,
    mode           text,                            -- of the request: enforce, hold or adjust
    reason         text,                            -- of a denial
    policy         text,                            -- the one that denied; of an admission the tightest
    name           text,                            -- the quota, its key, and what the policy answered
    quota          text,
    cost           bigint,
    limit_units    bigint,
    share          bigint,
    remaining      bigint,
    retry_after_ms bigint,
    degraded       text,
    epoch          bigint,
    latency_us     bigint,                          -- NULL: the store was not asked
    operation      text,
    weight         double precision NOT NULL,       -- so many admissions the row stands for
    times          bigint NOT NULL,                 -- equal denials of one second, or decisions that were lost
    last_at        timestamptz,                     -- of several, the last
    subject        jsonb,                           -- without the tenant; users, API keys, addresses and labels hashed
    others         jsonb,                           -- what the other policies answered
    -- It finds a tenant's decisions by time as well.
    PRIMARY KEY (tenant, at, id),
    CONSTRAINT decision_has_an_outcome CHECK (outcome IN ('denied', 'admitted', 'shadow_denied', 'lost')),
    CONSTRAINT decision_counts CHECK (times > 0 AND weight >= 1)
) PARTITION BY RANGE (at);
-- For questions about all tenants: rows arrive nearly in the order of their times.
CREATE INDEX decision_by_time ON decision USING brin (at);
-- It has what decisions are filtered by and summed up from: a day of a busy tenant is read without its rows.
CREATE INDEX decision_summary ON ONLY decision (tenant, at, id)
    INCLUDE (outcome, reason, policy, name, region, times, weight, last_at);

-- One row: the key of the hashes, which readers of the API and of copies lack, so that they cannot try values out.
CREATE TABLE decision_hash_key (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    key      bytea NOT NULL CHECK (length(key) = 32)
);
INSERT INTO decision_hash_key (key) VALUES (uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));

-- Make the partitions of some days where they are missing, and drop those of days before `kept_from`. A partition is
-- attached as in create_partition(). To drop one waits for its readers: the caller bounds that wait.
CREATE FUNCTION keep_decisions(kept_from date, first_day date, last_day date) RETURNS void LANGUAGE plpgsql
    SECURITY DEFINER
AS $$
DECLARE
    home      text := (SELECT relnamespace::regnamespace FROM pg_class WHERE oid = 'decision'::regclass);
    partition text;
    day       date;
BEGIN
    IF kept_from > (clock_timestamp() AT TIME ZONE 'UTC')::date OR last_day - first_day > 400 THEN
        RAISE EXCEPTION 'decisions of today are never dropped, and at most 400 days are made at once';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('keep_decisions'));
    FOR day IN SELECT generate_series(first_day, last_day, '1 day')::date LOOP
        partition := format('%s.%I', home, 'decision_' || day);
        IF to_regclass(partition) IS NULL THEN
            -- Vacuum marks pages of new rows visible, without which an index is not read alone.
            EXECUTE format('CREATE TABLE %s (LIKE decision INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES) '
                'WITH (autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000)',
                partition);
            EXECUTE format('ALTER TABLE decision ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                partition, day || ' 00:00:00+00', day + 1 || ' 00:00:00+00');
        END IF;
    END LOOP;
    FOR partition IN
        SELECT inhrelid::regclass FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
        WHERE inhparent = 'decision'::regclass AND relname < 'decision_' || kept_from ORDER BY relname
    LOOP
        EXECUTE format('DROP TABLE %s', partition);
    END LOOP;
END $$;
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION keep_decisions SET search_path = pg_catalog, %I, pg_temp', current_schema());
END $$;
REVOKE EXECUTE ON FUNCTION keep_decisions FROM PUBLIC;



-- === Jobs and health =================================================================================================

-- One row for each periodic job: the coordinator that locks it does the job.
CREATE TABLE job (
    name   text PRIMARY KEY,
    due_at timestamptz NOT NULL
);

-- One row: figures for metrics and health, which one coordinator measures for all.
CREATE TABLE measurement (
    only_row    boolean NOT NULL DEFAULT true PRIMARY KEY CHECK (only_row),
    figures     jsonb NOT NULL,
    measured_at timestamptz NOT NULL
);
