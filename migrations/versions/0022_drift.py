"""What drifts is looked for every five minutes, and there is none: no lease need be read to see that."""

from migrations.statements import execute

revision = "0022"
down_revision = "0021"

# Its columns change only together with `expires_at`, which an index has already: no update becomes dearer by it.
DRIFTING = """
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX lease_drifting ON lease (epoch, quota, period)
    WHERE region_consumed <> consumed AND state NOT IN ('quarantined', 'closed');
"""


def upgrade() -> None:
    execute(DRIFTING)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
