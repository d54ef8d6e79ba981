"""Create the schema of the first release in an empty database.

`0001_baseline.sql` stays as it is. Each later change is a step of its own, and the same change in
`migrations/schema.sql`, which states the schema of today. A test compares a migrated database with one that it made.
"""

from migrations.statements import execute, statements_of

revision = "0001"
down_revision = None


def upgrade() -> None:
    execute(statements_of("versions/0001_baseline.sql"))


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")
