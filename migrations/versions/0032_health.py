"""What coordinators share about health: figures that one of them measures for all, and when each region was heard.

The release before runs on this schema as it is: it neither reads nor writes these tables.
"""

from migrations.statements import execute

revision = "0032"
down_revision = "0031"

MEASUREMENT = """
CREATE TABLE measurement (
    only_row boolean NOT NULL DEFAULT true PRIMARY KEY CHECK (only_row),
    figures jsonb NOT NULL,
    measured_at timestamptz NOT NULL
);
"""
REGION_HEARD = """
CREATE TABLE region_heard (
    region text NOT NULL PRIMARY KEY REFERENCES region (name),
    heard_at timestamptz NOT NULL
) WITH (fillfactor = 50);
"""


def upgrade() -> None:
    execute(MEASUREMENT)
    execute(REGION_HEARD)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
