"""Whether a close goes on without units that services hold (docs/finance.md, "Closing a month").

The release before runs on this schema as it is: it waits for every hold.
"""

from migrations.statements import execute

revision = "0036"
down_revision = "0035"

HOLDS = """
ALTER TABLE period ADD COLUMN leaves_holds boolean NOT NULL DEFAULT false;
"""


def upgrade() -> None:
    execute(HOLDS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
