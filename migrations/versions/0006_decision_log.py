"""Add the decision log: a table with a partition for each day, the function that makes and drops these, and a key."""

from migrations.statements import execute, statements_of

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    execute(statements_of("versions/0006_decision_log.sql"))


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")
