"""Which installation a database belongs to, and where that was confirmed: a copy of it must not send webhooks.

The release before runs on this schema as it is: it knows no installations, and sends from a copy as well.
"""

from migrations.statements import execute

revision = "0035"
down_revision = "0034"

INSTALLATION = """
CREATE TABLE installation (
    only_row          boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    id                uuid NOT NULL,
    system_identifier text NOT NULL,           -- of the Postgres cluster; empty where it may not be read
    database_oid      bigint NOT NULL,
    places            text[] NOT NULL,         -- the addresses of it in coordinators' settings, or its name there
    confirmed_at      timestamptz NOT NULL
);
"""


def upgrade() -> None:
    execute(INSTALLATION)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
