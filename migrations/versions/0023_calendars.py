"""Periods follow calendars: in time zones, and by the anniversaries of subscriptions.

A subscription that was here before began, as far as anybody knows, when it was last changed.
"""

from migrations.statements import execute

revision = "0023"
down_revision = "0022"

CALENDARS = """
-- squawk-ignore ban-drop-constraint
ALTER TABLE period DROP CONSTRAINT period_kind_check;
ALTER TABLE period ADD CONSTRAINT period_kind_check
    CHECK (kind IN ('hour', 'day', 'month', 'anniversary')) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE period VALIDATE CONSTRAINT period_kind_check;
-- With "transfer_" before it, it is the name of a table: 63 characters.
-- squawk-ignore ban-drop-constraint
ALTER TABLE period DROP CONSTRAINT period_names_a_table;
ALTER TABLE period ADD CONSTRAINT period_names_a_table CHECK (id ~ '^[0-9A-Za-z:_-]{1,54}$') NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE period VALIDATE CONSTRAINT period_names_a_table;
ALTER TABLE period ADD COLUMN calendar text;   -- the kind, the zone, and of an anniversary the day
UPDATE period SET calendar = kind || '_UTC' WHERE state <> 'closed';
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX period_by_calendar ON period (calendar, ends_at);
"""

SUBSCRIPTIONS = """
ALTER TABLE subscription ADD COLUMN began_at timestamptz NOT NULL DEFAULT now();
UPDATE subscription SET began_at = changed_at;
"""


def upgrade() -> None:
    execute(CALENDARS)
    execute(SUBSCRIPTIONS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
