"""What is left of a period at its close, and goes over into the next (docs/adr/0039).

The release before runs on this schema as it is: it carries nothing over. A period into which a release after it has
carried something can be spent by it to its limit, and not beyond.
"""

from migrations.statements import execute

revision = "0030"
down_revision = "0029"

_ACCOUNTS = """'funding', 'unallocated', 'outstanding', 'consumed', 'suspense', 'estimated', 'written_off', 'overage',
        'carried', 'carried_in', 'carried_out', 'correction', 'adjustment', 'extension', 'unused_in', 'unused_out'"""

BOOKS = """
ALTER TABLE pool
    ADD COLUMN unused_in bigint NOT NULL DEFAULT 0,   -- left of the period before
    ADD COLUMN unused_out bigint NOT NULL DEFAULT 0,  -- left of this one, and in the next
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT pool_balances,
    ADD CONSTRAINT pool_balances CHECK (
        funded + extended + unused_in + adjustment + overage + carried_in + correction
        = unallocated + outstanding + suspense + carried + carried_out + unused_out + estimated + consumed
            + written_off) NOT VALID,
    ADD CONSTRAINT pool_carries_over_units CHECK (unused_in >= 0 AND unused_out >= 0) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE pool VALIDATE CONSTRAINT pool_balances;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE pool VALIDATE CONSTRAINT pool_carries_over_units;
"""

TRANSFERS = "".join(
    f"""
ALTER TABLE transfer
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT transfer_{side}_is_known,
    ADD CONSTRAINT transfer_{side}_is_known CHECK ({side} IN ({_ACCOUNTS})) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE transfer VALIDATE CONSTRAINT transfer_{side}_is_known;
"""
    for side in ("src", "dst")
)


def upgrade() -> None:
    execute(BOOKS)
    execute(TRANSFERS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
