-- A partition that is there already gets no index, which would lock it for long: its time is over in some days. So
-- nothing is built here.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX decision_summary ON ONLY decision (tenant, at, id)
    INCLUDE (outcome, reason, policy, name, region, times, weight, last_at);

-- Make the partitions of some days where they are missing, and drop those of days before `kept_from`. A partition is
-- attached as in create_partition(). To drop one waits for its readers: the caller bounds that wait.
CREATE OR REPLACE FUNCTION keep_decisions(kept_from date, first_day date, last_day date) RETURNS void LANGUAGE plpgsql
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
