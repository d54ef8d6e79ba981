"""Checks of a running installation: what each examines, what it found, and what to do.

A check is a pure rule over facts that somebody has gathered. Each service runs its own checks when it starts and every
few minutes, and `leasehold doctor` runs all of them, so both say the same. The codes are stable: the documentation
explains each of them, and programs compare them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

F = TypeVar("F")


class CheckState(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


PROBLEMS = frozenset((CheckState.WARNING, CheckState.FAILED))


class Verdict(NamedTuple):
    """The finding of a rule. `remedy` is what to do, if it is not what the check says."""

    state: CheckState
    found: str
    remedy: str = ""


def passed(found: str) -> Verdict:
    return Verdict(CheckState.OK, found)


def warning(found: str, remedy: str = "") -> Verdict:
    return Verdict(CheckState.WARNING, found, remedy)


def failure(found: str, remedy: str = "") -> Verdict:
    return Verdict(CheckState.FAILED, found, remedy)


def unknown(found: str, remedy: str = "") -> Verdict:
    return Verdict(CheckState.UNKNOWN, found, remedy)


class Check(NamedTuple, Generic[F]):
    """One check. `judge` returns None where the check does not apply."""

    code: str
    examines: str
    warns: str  # when it is a warning; empty: never
    fails: str  # when it has failed; empty: never
    remedy: str
    judge: Callable[[F], Verdict | None]


class CheckResult(Struct, frozen=True, kw_only=True):
    """The finding of a check about one subject, such as a coordinator or a store."""

    check: str  # the code
    subject: str
    state: CheckState
    found: str
    remedy: str  # empty: nothing is to be done


def judge(checks: Iterable[Check[F]], facts: F, subject: str) -> list[CheckResult]:
    """Return the results of all checks that apply to these facts."""
    verdicts = ((check, check.judge(facts)) for check in checks)
    return [result_of(check, subject, verdict) for check, verdict in verdicts if verdict is not None]


def result_of(check: Check[F], subject: str, verdict: Verdict) -> CheckResult:
    remedy = verdict.remedy or (check.remedy if verdict.state in PROBLEMS else "")
    return CheckResult(check=check.code, subject=subject, state=verdict.state, found=verdict.found, remedy=remedy)


def unexamined(checks: Iterable[Check[F]], subject: str, reason: str) -> list[CheckResult]:
    """Return each check as unknown: its facts could not be gathered."""
    return [result_of(check, subject, unknown(reason)) for check in checks]


# --- checks of both services ------------------------------------------------------------------------------------------


class UnknownSetting(NamedTuple):
    """A variable that has a service's prefix and that no setting reads, and the setting that it may be meant for."""

    name: str
    meant: str | None


def unknown_settings(
    environ: Mapping[str, str], prefix: str, known: Iterable[str], others: Iterable[str] = ()
) -> list[UnknownSetting]:
    """Return the variables with this prefix that have no effect. `others` are read by other programs."""
    read = sorted({*known, *others})
    names = [name for name in sorted(environ) if name.startswith(prefix)]
    return [
        UnknownSetting(name, _closest(name, read, prefix))
        for name in names
        if not {name, name.removesuffix("_FILE")} & set(read)
    ]


def _closest(name: str, known: Iterable[str], prefix: str) -> str | None:
    ends = [each.removeprefix(prefix) for each in known]
    return next((prefix + end for end in get_close_matches(name.removeprefix(prefix), ends, 1)), None)


def judge_settings(found: Sequence[UnknownSetting]) -> Verdict:
    if not found:
        return passed("every variable is a setting")
    named = (f"{each.name} (did you mean {each.meant}?)" if each.meant else each.name for each in found)
    return warning(f"no setting reads {', '.join(named)}")
