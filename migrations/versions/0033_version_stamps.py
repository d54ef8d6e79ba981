"""A stamp beside each version number: a number comes again after a restore of the database, and a stamp does not.

The release before advances the numbers and leaves the stamps: a number and a stamp together still name one state.
"""

from migrations.statements import execute

revision = "0033"
down_revision = "0032"

STAMPS = "".join(
    f"""
-- The table has one row.
-- squawk-ignore adding-field-with-default
ALTER TABLE {table} ADD COLUMN stamp uuid NOT NULL DEFAULT gen_random_uuid();
"""
    for table in ("policy_version", "block_version")
)


def upgrade() -> None:
    execute(STAMPS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
