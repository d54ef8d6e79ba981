"""What changes all day beside the document: overrides and blocks; and the answers that an Idempotency-Key repeats."""

from migrations.statements import execute

revision = "0009"
down_revision = "0008"

OVERRIDES = """
-- Another limit for some of a quota's keys, for a while. The newest that is in force counts.
CREATE TABLE limit_override (
    id          uuid PRIMARY KEY,
    key         text NOT NULL,                 -- quota and subject as a quota key, its fields in alphabetical order
    quota       text NOT NULL,
    subject     jsonb NOT NULL,
    value       jsonb NOT NULL,                -- units, or a rate as people write it
    valid_from  timestamptz NOT NULL,
    valid_until timestamptz,                   -- none: until it is deleted
    reason      text NOT NULL CHECK (reason <> ''),
    created_at  timestamptz NOT NULL,
    created_by  text NOT NULL,
    CONSTRAINT limit_override_lasts CHECK (valid_until > valid_from)
);
CREATE INDEX limit_override_by_key ON limit_override (key, id);
"""

BLOCKS = """
-- Who is denied everywhere, whatever their quotas say.
CREATE TABLE block (
    field       text NOT NULL CHECK (field IN ('tenant', 'user', 'api_key', 'ip')),
    value       text NOT NULL CHECK (length(value) BETWEEN 1 AND 256),
    reason      text NOT NULL CHECK (reason <> ''),
    created_at  timestamptz NOT NULL,
    created_by  text NOT NULL,
    valid_until timestamptz,                   -- none: until it is deleted
    PRIMARY KEY (field, value)
);

-- One row: grows with every change of the list.
CREATE TABLE block_version (
    only_row    boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    version     bigint NOT NULL
);
INSERT INTO block_version (version) VALUES (0);
"""

FIRST_ANSWERS = """
-- What a mutation with an Idempotency-Key was answered first. Without a status: it is being worked on.
CREATE TABLE first_answer (
    caller      uuid NOT NULL,
    key         text NOT NULL,
    asked       bytea NOT NULL,                -- the hash of the whole request
    claim       uuid NOT NULL,                 -- of the attempt that is at it, or was
    claimed_at  timestamptz NOT NULL,
    status      integer,
    headers     jsonb,
    body        bytea,
    PRIMARY KEY (caller, key)
);
CREATE INDEX first_answer_by_age ON first_answer (claimed_at);
"""


def upgrade() -> None:
    execute(OVERRIDES)
    execute(BLOCKS)
    execute(FIRST_ANSWERS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
