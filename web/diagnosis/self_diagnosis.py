"""A service's checks of itself: run at its start and every few minutes, and logged when a problem begins or ends."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from itertools import chain, repeat

import structlog
from msgspec import Struct

from protocol.clock import Clock
from protocol.diagnosis.checks import PROBLEMS, CheckResult

PAUSES_S = (5.0, 15.0)  # before the first looks: a service that has just started has measured nothing yet
EXAMINE_EVERY_S = 300.0
AT_MOST_S = 20.0  # for gathering the facts

_log = structlog.get_logger(__name__)


class CheckReport(Struct, frozen=True, kw_only=True):
    """The results of a service's checks of itself."""

    checked_at: datetime | None  # null: the first checks have not finished
    checks: list[CheckResult]


class SelfDiagnosis:
    def __init__(self, examine: Callable[[], Awaitable[list[CheckResult]]], clock: Clock) -> None:
        self._examine = examine
        self._clock = clock
        self._problems: set[tuple[str, str]] = set()
        self.report = CheckReport(checked_at=None, checks=[])

    def now(self) -> datetime:
        """Return the time by the service's clock, whether or not it may decide by it."""
        return self._clock.now()

    async def run(self) -> None:
        for pause_s in chain(PAUSES_S, repeat(EXAMINE_EVERY_S)):
            await asyncio.sleep(pause_s)
            await self.look()

    async def look(self) -> CheckReport:
        """Gather the facts and judge them now."""
        try:
            async with asyncio.timeout(AT_MOST_S):
                found = await self._examine()
        except Exception as error:  # of any kind: health reports what does not work
            _log.warning("checks could not run", error=type(error).__name__)
            return self.report
        self.report = CheckReport(checked_at=self._clock.now(), checks=found)
        self._log_changes(found)
        return self.report

    def _log_changes(self, found: Sequence[CheckResult]) -> None:
        problems = {(each.check, each.subject): each for each in found if each.state in PROBLEMS}
        for name in problems.keys() - self._problems:
            each = problems[name]
            _log.warning(
                "check found a problem",
                check=each.check,
                subject=each.subject,
                state=each.state.value,
                found=each.found,
                remedy=each.remedy,
            )
        for check, subject in self._problems - problems.keys():
            _log.info("check ok again", check=check, subject=subject)
        self._problems = set(problems)
