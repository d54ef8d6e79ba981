"""How people divide quotas over the regions: what they set for a region, and what they bring from one to another."""

from migrations.statements import execute

revision = "0015"
down_revision = "0014"

SETTINGS = """
-- What is not set (NULL) follows from the region's weight and from demand.
CREATE TABLE region_setting (
    key         text NOT NULL,                 -- quota and subject as a quota key, its fields in alphabetical order
    region      text NOT NULL REFERENCES region,
    weight      bigint CHECK (weight BETWEEN 0 AND 1000000),
    floor       jsonb,                         -- units of the period, or a rate as people write it
    ceiling     jsonb,                         -- likewise; where both are the same the region is pinned
    changed_at  timestamptz NOT NULL,
    changed_by  text NOT NULL,
    PRIMARY KEY (key, region),
    CONSTRAINT region_setting_says_something CHECK (num_nonnulls(weight, floor, ceiling) > 0)
);
"""

REBALANCES = """
CREATE TABLE rebalance (
    id          uuid PRIMARY KEY,
    version     bigint GENERATED ALWAYS AS IDENTITY UNIQUE,  -- what somebody else did since is told by it
    mode        text NOT NULL CHECK (mode IN ('move', 'weigh', 'even_out', 'drain', 'restore')),
    asked       jsonb NOT NULL,
    plan        jsonb NOT NULL,                -- what was there, what was to be, and what could not be
    region      text REFERENCES region,        -- that is drained or restored
    recalled    bigint NOT NULL CHECK (recalled >= 0),  -- of a drain: units that were outstanding when it began
    state       text NOT NULL CHECK (state IN ('running', 'done', 'partly', 'cancelled')),
    created_at  timestamptz NOT NULL,
    created_by  text NOT NULL,
    ended_at    timestamptz,
    CONSTRAINT rebalance_runs_or_has_ended CHECK ((state = 'running') = (ended_at IS NULL))
);
CREATE UNIQUE INDEX rebalance_of_region ON rebalance (region) WHERE state = 'running';

CREATE TABLE rebalance_move (
    rebalance   uuid NOT NULL REFERENCES rebalance,
    number      integer NOT NULL CHECK (number > 0),
    quota       text NOT NULL,
    period      text NOT NULL,
    source      text NOT NULL REFERENCES region,
    target      text REFERENCES region,        -- none: back to where no region holds it
    units       bigint NOT NULL CHECK (units > 0),
    returned    bigint NOT NULL DEFAULT 0,
    regranted   bigint NOT NULL DEFAULT 0 CHECK (regranted >= 0),
    reason      text,                          -- why it ended before all of it was there
    ended_at    timestamptz,
    PRIMARY KEY (rebalance, number),
    FOREIGN KEY (quota, period) REFERENCES pool,
    CONSTRAINT rebalance_move_leads_elsewhere CHECK (target <> source),
    CONSTRAINT rebalance_move_of_so_many CHECK (returned <= units),
    CONSTRAINT rebalance_move_of_what_is_back CHECK (regranted <= returned)
);
CREATE INDEX rebalance_move_open ON rebalance_move (quota, period) WHERE ended_at IS NULL;

-- So many moves of it are open: where there are none, nobody has to look.
ALTER TABLE pool ADD COLUMN moves integer NOT NULL DEFAULT 0;
"""


def upgrade() -> None:
    execute(SETTINGS)
    execute(REBALANCES)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
