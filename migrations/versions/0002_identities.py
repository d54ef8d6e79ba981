"""Name the callers of JWTs."""

from migrations.statements import execute

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    execute(_SQL)


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")


_SQL = """
CREATE TABLE identity (
    id            uuid PRIMARY KEY,
    issuer        text NOT NULL CHECK (issuer <> ''),
    subject       text NOT NULL CHECK (subject <> ''),
    name          text NOT NULL,
    first_seen_at timestamptz NOT NULL,
    CONSTRAINT identity_is_one_person UNIQUE (issuer, subject)
);
"""
