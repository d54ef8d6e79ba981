"""What came late for a closed period is resolved like suspense: of some of it there was never a lease."""

from migrations.statements import execute

revision = "0011"
down_revision = "0010"

RESOLUTIONS = """
ALTER TABLE resolution
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT resolution_epoch_quota_period_fkey,
    ADD CONSTRAINT resolution_of_an_epoch FOREIGN KEY (epoch) REFERENCES region_epoch NOT VALID;
"""


def upgrade() -> None:
    execute(RESOLUTIONS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
