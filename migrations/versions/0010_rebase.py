"""How a lane goes on whose ledger was put back to an older state: a resolution of a lane, beside those of leases."""

from migrations.statements import execute

revision = "0010"
down_revision = "0009"

RESOLUTIONS = """
ALTER TABLE resolution
    -- squawk-ignore ban-drop-not-null
    ALTER COLUMN quota DROP NOT NULL,
    -- squawk-ignore ban-drop-not-null
    ALTER COLUMN period DROP NOT NULL,
    ADD COLUMN lane integer,
    ADD COLUMN seq bigint,                     -- of the batch that was kept: the lane goes on with it
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT resolution_kind_check,
    ADD CONSTRAINT resolution_kind_check CHECK (
        kind IN ('write_off', 'charge', 'estimate', 'unattributed', 'rebase')) NOT VALID,
    ADD CONSTRAINT resolution_is_of_a_lease_or_a_lane CHECK (
        CASE kind WHEN 'rebase' THEN quota IS NULL AND period IS NULL AND lane IS NOT NULL AND seq IS NOT NULL
        ELSE quota IS NOT NULL AND period IS NOT NULL AND lane IS NULL AND seq IS NULL END) NOT VALID,
    ADD CONSTRAINT resolution_of_a_lane FOREIGN KEY (epoch, lane) REFERENCES lane NOT VALID;
-- One open proposal for each lane as well. The index before stays: the release before names its columns.
-- squawk-ignore require-concurrent-index-creation
CREATE UNIQUE INDEX resolution_open_of_either ON resolution (epoch, quota, period, lane) NULLS NOT DISTINCT
    WHERE approved_at IS NULL;
"""

# Batches that show the ledger to be behind are kept whole, under no quota and no period.
QUARANTINE = """
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX quarantine_of_lanes ON quarantine (epoch, lane, seq) WHERE quota = '';
"""


def upgrade() -> None:
    execute(RESOLUTIONS)
    execute(QUARANTINE)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
