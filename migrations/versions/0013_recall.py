"""What waits in suspense is looked for every half a minute, to be asked for: it is little of all that there is."""

from migrations.statements import execute

revision = "0013"
down_revision = "0012"

WAITING = """
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX lease_in_suspense ON lease (epoch) WHERE suspense > 0;
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX correction_carried ON correction (epoch) WHERE carried > 0;
"""


def upgrade() -> None:
    execute(WAITING)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
