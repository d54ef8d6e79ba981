"""Which of the coordinator's jobs fail, and how often in a row: a log line when it begins, and one when it is over."""

from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from coordinator.database.engine import CONTENTION, OUTAGE
from coordinator.outages import DatabaseUnavailable

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Failing:
    times: int
    error: str
    is_logged: bool = False


class JobFailures:
    """An outage of the database fails every job many times a second. It is a state of its own (see `health.py`), so the
    failures that it causes are counted and not logged.
    """

    TOO_OFTEN = 5

    def __init__(self) -> None:
        self._failing: dict[str, Failing] = {}

    def failed(self, job: str, error: Exception) -> None:
        """Called while the exception is handled, so that the log can show where it came from."""
        failing = self._failing.setdefault(job, Failing(0, ""))
        if is_outage(error):
            return
        failing.times, failing.error = failing.times + 1, type(error).__name__
        if not failing.is_logged:
            _log.exception("job fails", job=job, error=failing.error)
            failing.is_logged = True

    def worked(self, job: str) -> None:
        failing = self._failing.pop(job, None)
        if failing is not None and failing.is_logged:
            _log.info("job works again", job=job, failures=failing.times)

    def in_a_row(self) -> Mapping[str, Failing]:
        return {job: failing for job, failing in self._failing.items() if failing.times >= self.TOO_OFTEN}


def is_outage(error: BaseException) -> bool:
    """Return whether the database could not be used at all: a refusal for contention is the job's own failure."""
    if isinstance(error, DatabaseUnavailable):
        return not isinstance(error.__cause__, CONTENTION)
    return isinstance(error, OUTAGE)
