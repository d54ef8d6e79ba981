"""Exports: what was asked for, and the manifest of what it is. The lines themselves stay where they are."""

from migrations.statements import execute

revision = "0018"
down_revision = "0017"

EXPORTS = """
-- Every line of usage up to a seal, in the order of the ledger: the same bytes whenever it is read.
CREATE TABLE export (
    id          uuid PRIMARY KEY,
    period      text NOT NULL REFERENCES period,
    tenant      text,                          -- none: of all
    format      text NOT NULL CONSTRAINT export_format_is_known CHECK (format IN ('csv', 'ndjson')),
    seal        bigint NOT NULL,               -- its number
    is_final    boolean NOT NULL,              -- the period is closed, and the seal covers all of it
    asked_by    uuid NOT NULL,                 -- the token
    asked_at    timestamptz NOT NULL,
    finished_at timestamptz,
    reached     bigint NOT NULL DEFAULT 0,     -- the transfer up to which it was counted
    rows        bigint NOT NULL DEFAULT 0,
    bytes       bigint NOT NULL DEFAULT 0,
    sha256      bytea,
    marks       jsonb,                         -- [byte, transfer]: where a download may go on
    CONSTRAINT export_is_finished_whole CHECK (
        (finished_at IS NULL) = (sha256 IS NULL) AND (finished_at IS NULL) = (marks IS NULL))
);
CREATE INDEX export_to_do ON export (asked_at) WHERE finished_at IS NULL;
"""


def upgrade() -> None:
    execute(EXPORTS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
