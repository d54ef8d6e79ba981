"""A region's store may be a Cluster: each of its cells has an epoch of its own (docs/adr/0022)."""

from migrations.statements import execute

revision = "0016"
down_revision = "0015"

# A single store is one cell; so is whatever the release before opens.
CELLS = """
ALTER TABLE region_epoch
    ADD COLUMN cell integer NOT NULL DEFAULT 0,
    ADD COLUMN cells integer NOT NULL DEFAULT 1,
    ADD CONSTRAINT region_epoch_of_a_cell CHECK (cell >= 0 AND cell < cells) NOT VALID;
-- One writer: each cell of a region has one epoch that may be granted to.
-- squawk-ignore require-concurrent-index-creation
CREATE UNIQUE INDEX region_epoch_current_of_cell ON region_epoch (region, cell) WHERE state = 'current';
-- squawk-ignore require-concurrent-index-deletion
DROP INDEX region_epoch_current;
"""


def upgrade() -> None:
    execute(CELLS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
