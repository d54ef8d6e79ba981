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
            EXECUTE format('CREATE TABLE %s (LIKE decision INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)',
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
