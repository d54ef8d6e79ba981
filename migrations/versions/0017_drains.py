"""How far a drain has come, and why a rebalance ended before all was done."""

from migrations.statements import execute

revision = "0017"
down_revision = "0016"

DRAINS = """
ALTER TABLE rebalance
    ADD COLUMN returned bigint NOT NULL DEFAULT 0,  -- of a drain: of what was recalled, what is accounted for
    ADD COLUMN reason text;
"""


def upgrade() -> None:
    execute(DRAINS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
