-- The decision log in ClickHouse: a queue that reads the topic, the table, and a view that fills it from the queue.
-- Set the brokers and, if there is one, the security of your Kafka: see docs/guides/decisions.md.

CREATE TABLE decisions
(
    id             UUID,
    at             DateTime64(3, 'UTC'),        -- by the clock of the agent's machine
    last_at        Nullable(DateTime64(3, 'UTC')),
    count          UInt64,                      -- equal denials of one second
    weight         Float64,                     -- so many admissions the row stands for
    outcome        LowCardinality(String),      -- denied, admitted, shadow_denied, lost
    reason         LowCardinality(String),
    tenant         String,
    region         LowCardinality(String),
    agent          LowCardinality(String),
    epoch          Nullable(UInt64),
    policy         LowCardinality(String),
    quota          LowCardinality(String),
    key            String,
    cost           Nullable(Int64),
    `limit`        Nullable(Int64),
    share          Nullable(Int64),
    remaining      Nullable(Int64),
    retry_after_ms Nullable(Int64),
    degraded       LowCardinality(String),
    mode           LowCardinality(String),
    operation      String,
    latency_us     Nullable(UInt64),
    subject        Map(LowCardinality(String), String),
    others         String                       -- JSON: what the other policies answered
)
ENGINE = ReplacingMergeTree                     -- a message that comes twice has the same id
PARTITION BY toDate(at)
ORDER BY (tenant, at, id)
TTL toDateTime(at) + INTERVAL 30 DAY;

CREATE TABLE decisions_queue (message String)
ENGINE = Kafka
SETTINGS
    kafka_broker_list = 'kafka:9092',
    kafka_topic_list = 'leasehold.decisions',
    kafka_group_name = 'clickhouse',
    kafka_format = 'JSONAsString';

-- Fields that a later version of the schema adds are ignored. Other versions are for another view.
CREATE MATERIALIZED VIEW decisions_reader TO decisions AS
SELECT
    JSONExtract(message, 'id', 'UUID') AS id,
    parseDateTime64BestEffort(JSONExtractString(message, 'at'), 3, 'UTC') AS at,
    parseDateTime64BestEffortOrNull(JSONExtractString(message, 'last_at'), 3, 'UTC') AS last_at,
    JSONExtract(message, 'count', 'UInt64') AS count,
    JSONExtract(message, 'weight', 'Float64') AS weight,
    JSONExtractString(message, 'outcome') AS outcome,
    JSONExtractString(message, 'reason') AS reason,
    JSONExtractString(message, 'tenant') AS tenant,
    JSONExtractString(message, 'region') AS region,
    JSONExtractString(message, 'agent') AS agent,
    JSONExtract(message, 'epoch', 'Nullable(UInt64)') AS epoch,
    JSONExtractString(message, 'policy') AS policy,
    JSONExtractString(message, 'quota') AS quota,
    JSONExtractString(message, 'key') AS key,
    JSONExtract(message, 'cost', 'Nullable(Int64)') AS cost,
    JSONExtract(message, 'limit', 'Nullable(Int64)') AS `limit`,
    JSONExtract(message, 'share', 'Nullable(Int64)') AS share,
    JSONExtract(message, 'remaining', 'Nullable(Int64)') AS remaining,
    JSONExtract(message, 'retry_after_ms', 'Nullable(Int64)') AS retry_after_ms,
    JSONExtractString(message, 'degraded') AS degraded,
    JSONExtractString(message, 'mode') AS mode,
    JSONExtractString(message, 'operation') AS operation,
    JSONExtract(message, 'latency_us', 'Nullable(UInt64)') AS latency_us,
    JSONExtract(message, 'subject', 'Map(String, String)') AS subject,
    JSONExtractRaw(message, 'others') AS others
FROM decisions_queue
WHERE JSONExtractUInt(message, 'schema_version') = 1;
