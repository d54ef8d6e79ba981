"""Who is told of what happens to the books: webhooks, what they are told, and how each delivery stands."""

from migrations.statements import execute

revision = "0021"
down_revision = "0020"

WEBHOOKS = """
CREATE TABLE webhook (
    id              uuid PRIMARY KEY,
    url             text NOT NULL CHECK (url ~ '^https?://'),
    events          text[] NOT NULL CHECK (cardinality(events) > 0),
    secret          text NOT NULL CHECK (secret <> ''),  -- as it is: each delivery is signed with it
    previous_secret text,                      -- both sign until then
    previous_until  timestamptz,
    paused          boolean NOT NULL DEFAULT false,
    created_at      timestamptz NOT NULL,
    created_by      text NOT NULL,
    CONSTRAINT webhook_rotates_whole CHECK (num_nonnulls(previous_secret, previous_until) IN (0, 2))
);
"""

# Written in the transaction of what it tells, where somebody listens.
OUTBOX = """
CREATE TABLE outbox (
    id          uuid PRIMARY KEY,              -- whoever receives it twice knows it by this
    kind        text NOT NULL CHECK (kind ~ '^[a-z_]+[.][a-z_]+$'),
    data        jsonb NOT NULL,
    occurred_at timestamptz NOT NULL
);
CREATE INDEX outbox_by_time ON outbox (occurred_at);

CREATE TABLE delivery (
    event        uuid NOT NULL REFERENCES outbox ON DELETE CASCADE,
    webhook      uuid NOT NULL REFERENCES webhook ON DELETE CASCADE,
    attempts     integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    next_at      timestamptz NOT NULL,         -- until then it is somebody's, or rests
    delivered_at timestamptz,
    dead_at      timestamptz,                  -- it is not tried again, unless people replay it
    status       integer,                      -- the last answer's
    error        text,
    PRIMARY KEY (event, webhook),
    CONSTRAINT delivery_ends_once CHECK (num_nonnulls(delivered_at, dead_at) < 2)
);
CREATE INDEX delivery_due ON delivery (next_at) WHERE delivered_at IS NULL AND dead_at IS NULL;
CREATE INDEX delivery_of_webhook ON delivery (webhook, event);
"""


def upgrade() -> None:
    execute(WEBHOOKS)
    execute(OUTBOX)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
