"""Refuse an answer whose lines are in an archive, and say where that is."""

from typing import NamedTuple

from coordinator.archives.statements import RecordedArchive
from web.problems import Problem


class Archived(NamedTuple):
    """The answer takes lines of an archive that cannot be read for it."""

    archive: RecordedArchive
    reason: str


def archived_problem(found: Archived) -> Problem:
    period, location = found.archive.period, found.archive.location
    detail = f"The lines of {period} are archived in {location}: {found.reason}"
    return Problem("archived", detail, extra={"period": period, "location": location})
