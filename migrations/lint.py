"""Lint the SQL of each migration with squawk: what it locks and rewrites in a database in use.

Each migration is a file of its own for squawk, because it permits a lock on a table that the same file creates and must
not permit one on a table of an earlier migration. `.squawk.toml` says which rules do not apply, and why.
"""

import io
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

from alembic import command
from alembic.script import Script, ScriptDirectory

from migrations.run import alembic_config

SETTINGS = Path(__file__).parent.parent / ".squawk.toml"


def offline_sql(script: Script) -> str:
    """Return the SQL of one step, as alembic prints it without a database."""
    printed = io.StringIO()
    command.upgrade(alembic_config(printed), f"{script.down_revision or 'base'}:{script.revision}", sql=True)
    return printed.getvalue()


def main() -> int:
    squawk = Path(sysconfig.get_path("scripts")) / "squawk"
    with TemporaryDirectory() as directory:
        for script in ScriptDirectory.from_config(alembic_config()).walk_revisions():
            Path(directory, Path(script.path).stem + ".sql").write_text(offline_sql(script))
        return subprocess.run([squawk, "--config", SETTINGS, f"{directory}/*.sql"], check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
