"""What proof needs: seals, the gate that makes a sealed position final, verifications, and who does what by itself.

The gate is a table without columns or rows. Whatever books takes a weak lock on it *before* its first position is
handed out, and holds it until it has ended; these locks do not hinder each other. A sealer takes the strong lock: when
it has it, no position that was handed out is still to be committed.
"""

from migrations.statements import execute

revision = "0003"
down_revision = "0002"

GATE = """
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
CREATE TRIGGER audit_passes_the_gate BEFORE INSERT ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION pass_position_gate();
"""

SEALS = """
-- What the ledger was up to a position. Each seal hashes the one before, and what came since.
CREATE TABLE seal (
    number         bigint PRIMARY KEY CHECK (number > 0),
    previous       bytea NOT NULL,             -- the hash of the seal before
    position       bigint NOT NULL CHECK (position >= 0),     -- of the last report
    transfer       bigint NOT NULL CHECK (transfer >= 0),     -- the id of the last transfer
    audit          bigint NOT NULL CHECK (audit >= 0),        -- the id of the last entry
    reports        bigint NOT NULL CHECK (reports >= 0),      -- since the seal before, like all below
    reports_hash   bytea NOT NULL,
    movements      bigint NOT NULL CHECK (movements >= 0),    -- transfers that no report tells of
    movements_hash bytea NOT NULL,
    entries        bigint NOT NULL CHECK (entries >= 0),      -- of the audit
    entries_hash   bytea NOT NULL,
    balances       jsonb NOT NULL,             -- the trial balance of each period that has moved
    sealed_at      timestamptz NOT NULL UNIQUE,
    hash           bytea NOT NULL UNIQUE
);
CREATE TRIGGER seal_is_append_only BEFORE UPDATE OR DELETE ON seal
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER seal_is_never_truncated BEFORE TRUNCATE ON seal
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- The transfers that no report tells of, in the order in which a seal hashes them.
-- Of a table in partitions it cannot be made concurrently, and there are few such rows.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX transfer_of_no_report ON transfer (id) WHERE seq IS NULL;
"""

JOBS = """
-- One row for each thing that coordinators do by themselves: who locks it does it.
CREATE TABLE job (
    name        text PRIMARY KEY,
    due_at      timestamptz NOT NULL
);

CREATE TABLE verification (
    id          uuid PRIMARY KEY,
    asked_by    uuid NOT NULL,                 -- the token
    asked_at    timestamptz NOT NULL,
    finished_at timestamptz,
    result      jsonb,
    CHECK ((finished_at IS NULL) = (result IS NULL))
);
CREATE INDEX verification_to_do ON verification (asked_at) WHERE result IS NULL;
"""


def upgrade() -> None:
    execute(GATE)
    execute(SEALS)
    execute(JOBS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
