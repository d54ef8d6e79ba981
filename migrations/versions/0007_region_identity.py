"""Let agents of a region authenticate themselves by a name in their client certificate."""

from migrations.statements import execute

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    execute("""
        CREATE TABLE region_identity (
            identity   text PRIMARY KEY CONSTRAINT region_identity_is_short CHECK (length(identity) BETWEEN 1 AND 1000),
            region     text NOT NULL REFERENCES region,
            created_at timestamptz NOT NULL
        );
    """)


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")
