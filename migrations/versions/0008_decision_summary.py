"""Add an index from which decisions are filtered and summed up, to the partitions that are made from now on."""

from migrations.statements import execute, statements_of

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    execute(statements_of("versions/0008_decision_summary.sql"))


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")
