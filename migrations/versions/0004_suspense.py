"""What becomes of units that no report has accounted for: expiry, epochs that lost data, retirement, resolutions."""

from migrations.statements import execute

revision = "0004"
down_revision = "0003"

EPOCHS = """
ALTER TABLE region_epoch
    ADD COLUMN lost_data boolean NOT NULL DEFAULT false,  -- its store forgot something: returns may have been spent
    ADD COLUMN retired_at timestamptz,
    ADD COLUMN retired_by uuid,
    ADD COLUMN retired_because text,
    -- Whoever ends an epoch says why.
    ADD CONSTRAINT region_epoch_retired CHECK (
        state <> 'retired' OR (retired_at IS NOT NULL AND retired_by IS NOT NULL AND retired_because <> '')) NOT VALID;
"""

LEASES = """
ALTER TABLE lease
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT lease_state_check,
    ADD CONSTRAINT lease_state_check CHECK (
        state IN ('active', 'expired', 'fenced', 'lost', 'quarantined', 'retired')) NOT VALID;
-- A wider rule than the one before: no row that is there can break it. What was fenced until now booked no returns.
UPDATE lease SET state = 'lost' WHERE state = 'fenced';
-- What runs out, for the loop that looks for it again and again.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX lease_to_expire ON lease (expires_at) WHERE outstanding > 0;
"""

RESOLUTIONS = """
-- How people end what no evidence ends: proposed by one, approved by another.
CREATE TABLE resolution (
    id          uuid PRIMARY KEY,
    epoch       bigint NOT NULL,
    quota       text NOT NULL,
    period      text NOT NULL,
    kind        text NOT NULL CHECK (kind IN ('write_off', 'charge', 'estimate', 'unattributed')),
    suspense    bigint NOT NULL CHECK (suspense >= 0),           -- as it was when it was proposed
    charged     bigint NOT NULL CHECK (charged >= 0 AND charged <= suspense),
    reason      text NOT NULL CHECK (reason <> ''),
    proposed_by uuid NOT NULL,
    proposed_at timestamptz NOT NULL,
    approved_by uuid,
    approved_at timestamptz,
    FOREIGN KEY (epoch, quota, period) REFERENCES lease,
    CONSTRAINT resolution_has_two_people CHECK (approved_by <> proposed_by),
    CHECK ((approved_by IS NULL) = (approved_at IS NULL))
);
-- One open proposal for each lease: two could both be right for the same units.
CREATE UNIQUE INDEX resolution_open ON resolution (epoch, quota, period) WHERE approved_at IS NULL;
"""


def upgrade() -> None:
    execute(EPOCHS)
    execute(LEASES)
    execute(RESOLUTIONS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
