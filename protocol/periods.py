"""What periods are called. The shape of an id tells its kind, so one table serves who writes ids and who reads them.

2026-11-18T09   hour        2026-11-18   day        2026-11   month
"""

from datetime import UTC, datetime

from protocol.policy import PeriodKind

PERIOD_FORMATS = {PeriodKind.HOUR: "%Y-%m-%dT%H", PeriodKind.DAY: "%Y-%m-%d", PeriodKind.MONTH: "%Y-%m"}


def period_id(kind: PeriodKind, moment: datetime) -> str:
    """Of the period of that kind which holds the moment."""
    return moment.astimezone(UTC).strftime(PERIOD_FORMATS[kind])
