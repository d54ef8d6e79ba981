"""Which revisions this code knows, by the names of their files: asked at run time, where alembic is not loaded."""

from importlib.resources import files


def known_revisions() -> list[str]:
    """Oldest first. A test holds them against what alembic makes of the same files."""
    names = (file.name for file in files("migrations").joinpath("versions").iterdir())
    return sorted(name.partition("_")[0] for name in names if name[:1].isdigit() and name.endswith(".py"))


def is_behind(revision: str | None) -> bool:
    """True for a schema older than this code. A newer one is not behind: old code runs on the new schema."""
    return revision is None or revision in known_revisions()[:-1]
