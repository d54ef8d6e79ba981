"""The allowances of a tenant that is put on another plan are brought to their new limits at once: it finds them."""

from migrations.statements import execute

revision = "0024"
down_revision = "0023"

POOLS = """
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX pool_by_tenant ON pool (tenant, period);
"""


def upgrade() -> None:
    execute(POOLS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
