"""The seals that an auditor kept elsewhere, with the verification that compares them."""

from migrations.statements import execute

revision = "0034"
down_revision = "0033"

KEPT = """
ALTER TABLE verification ADD COLUMN kept jsonb NOT NULL DEFAULT '[]';
"""


def upgrade() -> None:
    execute(KEPT)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
