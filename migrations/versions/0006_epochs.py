"""What is known of an epoch's end, and that what people approved stands."""

from migrations.statements import execute

revision = "0006"
down_revision = "0004"

EPOCHS = """
-- Nobody showed that its store lost data, but nobody said that it did not: a store that says so later is believed.
ALTER TABLE region_epoch ADD COLUMN loss_is_assumed boolean NOT NULL DEFAULT false;
"""

# As the ledger itself: what was approved has moved units.
RESOLUTIONS = """
CREATE FUNCTION keep_approved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'what was approved stands: % of resolution % is refused', TG_OP, OLD.id;
END $$;
CREATE TRIGGER resolution_stands_once_approved BEFORE UPDATE OR DELETE ON resolution
    FOR EACH ROW WHEN (OLD.approved_at IS NOT NULL) EXECUTE FUNCTION keep_approved();
CREATE TRIGGER resolution_is_never_truncated BEFORE TRUNCATE ON resolution
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""


def upgrade() -> None:
    execute(EPOCHS)
    execute(RESOLUTIONS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
