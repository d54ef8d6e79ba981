"""What people correct in the books by a decision of two: credits, debits and write-offs.

The release before runs on this schema as it is: it knows no adjustments, and changes none.
"""

from migrations.statements import execute

revision = "0019"
down_revision = "0018"

# What came from the account `adjustment` is a source beside the limit, so that a changed limit never takes it away.
POOLS = """
ALTER TABLE pool
    ADD COLUMN adjustment bigint NOT NULL DEFAULT 0,  -- credits and write-offs, less debits: the only one below zero
    ADD COLUMN credited bigint NOT NULL DEFAULT 0,    -- of that, what can be spent: credits less debits
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT pool_balances,
    ADD CONSTRAINT pool_balances CHECK (
        funded + adjustment + overage + carried_in + correction
        = unallocated + outstanding + suspense + carried + carried_out + estimated + consumed + written_off) NOT VALID,
    ADD CONSTRAINT pool_is_credited_by_adjustments CHECK (adjustment >= credited) NOT VALID,
    ADD CONSTRAINT pool_is_debited_of_what_it_has CHECK (funded + credited >= 0) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE pool VALIDATE CONSTRAINT pool_balances;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE pool VALIDATE CONSTRAINT pool_is_credited_by_adjustments;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE pool VALIDATE CONSTRAINT pool_is_debited_of_what_it_has;
"""

ADJUSTMENTS = """
CREATE TABLE adjustment (
    id          uuid PRIMARY KEY,              -- and of its movement
    quota       text NOT NULL,
    period      text NOT NULL,                 -- that it is about
    kind        text NOT NULL CHECK (kind IN ('credit', 'debit', 'write_off')),
    units       bigint NOT NULL CHECK (units > 0),
    reason      text NOT NULL CHECK (reason <> ''),
    document    text NOT NULL CHECK (document <> ''),  -- where somebody finds what it rests on
    proposed_by uuid NOT NULL,
    proposed_at timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    approved_by uuid,
    approved_at timestamptz,
    booked_in   text,                          -- the period: another one if the units could not be moved there
    withdrawn_by uuid,
    withdrawn_at timestamptz,
    FOREIGN KEY (quota, booked_in) REFERENCES pool,
    CONSTRAINT adjustment_has_two_people CHECK (approved_by <> proposed_by),
    CONSTRAINT adjustment_is_approved_whole CHECK (num_nonnulls(approved_by, approved_at, booked_in) IN (0, 3)),
    CONSTRAINT adjustment_is_withdrawn_whole CHECK (num_nonnulls(withdrawn_by, withdrawn_at) IN (0, 2)),
    CONSTRAINT adjustment_ends_once CHECK (num_nonnulls(approved_at, withdrawn_at) < 2),
    CONSTRAINT adjustment_is_approved_in_time CHECK (approved_at <= expires_at)
);
-- What a reconciliation counts, and what bounds a write-off.
CREATE INDEX adjustment_of_books ON adjustment (booked_in) WHERE booked_in IS NOT NULL;
CREATE INDEX adjustment_of_pool ON adjustment (quota, period);
CREATE INDEX adjustment_by_time ON adjustment (proposed_at, id);

-- As the ledger itself: what was approved has moved units.
CREATE FUNCTION keep_adjustment() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'what has ended stands: % of adjustment % is refused', TG_OP, OLD.id;
END $$;
CREATE TRIGGER adjustment_stands_once_ended BEFORE UPDATE OR DELETE ON adjustment
    FOR EACH ROW WHEN (OLD.approved_at IS NOT NULL OR OLD.withdrawn_at IS NOT NULL) EXECUTE FUNCTION keep_adjustment();
CREATE TRIGGER adjustment_is_never_truncated BEFORE TRUNCATE ON adjustment
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""


def upgrade() -> None:
    execute(POOLS)
    execute(ADJUSTMENTS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
