"""Create the schema of `migrations/schema.sql` in an empty database.

Until the first release a change of the schema is a change of that file. With the first release its text is copied into
this step, which stays as it is from then on; each later change is a step of its own, and the same change in the file. A
test compares a migrated database with one that the file made.
"""

from migrations.statements import execute, schema

revision = "0001"
down_revision = None


def upgrade() -> None:
    execute(schema())


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")
