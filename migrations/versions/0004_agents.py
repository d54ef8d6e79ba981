"""Keep what each agent last stated about itself: its release and its capabilities."""

from migrations.statements import execute

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    execute("""
        CREATE TABLE region_agent (
            region       text NOT NULL REFERENCES region,
            agent        text NOT NULL,
            release      text NOT NULL,
            capabilities text[] NOT NULL,
            last_seen_at timestamptz NOT NULL,
            PRIMARY KEY (region, agent)
        ) WITH (fillfactor = 50)
    """)


def downgrade() -> None:
    raise RuntimeError("a ledger cannot be downgraded: restore a backup instead")
