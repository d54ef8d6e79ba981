"""A key for each region, with which its agents seal the ids of holds.

The release before runs on this schema as it is: it does not read the column.
"""

from migrations.statements import execute

revision = "0031"
down_revision = "0030"

KEYS = """
ALTER TABLE region ADD COLUMN hold_key bytea;
ALTER TABLE region ALTER COLUMN hold_key SET DEFAULT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());
UPDATE region SET hold_key = uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());
ALTER TABLE region ADD CONSTRAINT region_has_a_hold_key
    CHECK (hold_key IS NOT NULL AND length(hold_key) = 32) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE region VALIDATE CONSTRAINT region_has_a_hold_key;
"""


def upgrade() -> None:
    execute(KEYS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
