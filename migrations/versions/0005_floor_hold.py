"""Keep units for a region after a move, until a time."""

from migrations.statements import execute

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    execute(
        """
        CREATE TABLE floor_hold (
            quota     text NOT NULL,
            period    text NOT NULL,
            region    text NOT NULL REFERENCES region,
            units     bigint NOT NULL CHECK (units > 0),
            until     timestamptz NOT NULL,
            rebalance uuid NOT NULL REFERENCES rebalance,
            PRIMARY KEY (quota, period, region),
            FOREIGN KEY (quota, period) REFERENCES pool
        );
        """
    )


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")
