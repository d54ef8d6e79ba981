"""What a region may spend beyond its leases while it is cut off, and what it did (docs/adr/0034).

The release before runs on this schema as it is: it tells regions of no overdraft, so they have none.
"""

from migrations.statements import execute

revision = "0029"
down_revision = "0028"

OVERDRAFTS = """
ALTER TABLE lease
    ADD COLUMN overdraft bigint NOT NULL DEFAULT 0,  -- kept for it, for the whole period
    ADD COLUMN overdrawn bigint NOT NULL DEFAULT 0,  -- of that, what its region says it spent
    ADD CONSTRAINT lease_is_overdrawn_by_units CHECK (overdraft >= 0 AND overdrawn >= 0) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE lease VALIDATE CONSTRAINT lease_is_overdrawn_by_units;
"""


def upgrade() -> None:
    execute(OVERDRAFTS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
