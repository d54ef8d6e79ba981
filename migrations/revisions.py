"""The revisions that this code knows, from the names of their files: the services do not load alembic."""

from importlib.resources import files

NEEDS = "needs release "  # begins the comment on `alembic_version`, if older releases do not run on the schema


def known_revisions() -> list[str]:
    """Return all revisions, oldest first. A test compares them with those that alembic finds in the same files."""
    names = (file.name for file in files(__package__).joinpath("versions").iterdir())
    return sorted(name.partition("_")[0] for name in names if name[:1].isdigit() and name.endswith(".py"))


def is_behind(revision: str | None) -> bool:
    """Return whether a schema is older than this code. A newer one is not: code runs on the next release's schema."""
    return revision is None or revision in known_revisions()[:-1]
