"""What coordinators remember of rates that are shared by demand: which shares may be in force (docs/adr/0024).

It is no ledger, and written with every report: so it is not logged. Whoever finds nothing begins anew, and gives nobody
more than it has before all have spoken.
"""

from migrations.statements import execute

revision = "0020"
down_revision = "0019"

RATE_SHARES = """
CREATE UNLOGGED TABLE rate_share (
    quota text PRIMARY KEY,
    state bytea NOT NULL,  -- domain/sharing.py: Shared, as MessagePack
    reported_at timestamptz NOT NULL
) WITH (fillfactor = 50);  -- a row is written every two seconds, and where it stands
"""


def upgrade() -> None:
    execute(RATE_SHARES)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
