"""Keep the trace that a webhook event belongs to, so that its delivery continues it."""

from migrations.statements import execute

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    execute("ALTER TABLE outbox ADD COLUMN traceparent text")


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")
