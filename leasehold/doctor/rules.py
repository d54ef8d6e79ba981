"""The checks of what only an outside view shows, as pure rules over facts."""

from datetime import timedelta

from leasehold.doctor.facts import AccessFacts, ClockFacts, HealthFacts, ReleaseFacts, TlsFacts
from protocol.counting import counted
from protocol.diagnosis.checks import Check, Verdict, failure, passed, unknown, warning

EXPIRES_WARN, EXPIRES_FAIL = timedelta(days=21), timedelta(days=3)
CLOCK_WARN = timedelta(seconds=1)
OK, UNAUTHORIZED, FORBIDDEN = 200, 401, 403
MAX_RELEASES = 2


def judge_health(facts: HealthFacts) -> Verdict:
    if facts.fault:
        return failure(facts.fault, "Look whether it runs, and at the network between it and this machine.")
    if facts.status == "ready":
        return passed(f"ready, in {facts.took_ms:.0f} ms")
    text = f"{facts.status.replace('_', ' ')}: {'; '.join(facts.reasons)}"
    return warning(text) if facts.status == "degraded" else failure(text)


def judge_tls(facts: TlsFacts) -> Verdict:
    if not facts.is_encrypted:
        return passed("on this machine") if facts.is_local else warning("the connection is not encrypted")
    if facts.fault:
        return failure(facts.fault)
    if facts.expires_at is None:
        return passed("encrypted, and the certificate is verified")
    left = facts.expires_at - facts.now
    text = f"the certificate is verified and expires in {counted(left.days, 'day')}"
    if left < EXPIRES_FAIL:
        return failure(text)
    return warning(text) if left < EXPIRES_WARN else passed(text)


def judge_access(facts: AccessFacts) -> Verdict:
    if facts.status == OK:
        return passed(f"{facts.variable} is accepted" if facts.is_set else "no token is needed")
    if facts.status is None:
        return unknown("it did not answer")
    if facts.status == UNAUTHORIZED and not facts.is_set:
        return unknown(f"{facts.variable} is not set, so its own checks are missing", f"Set {facts.variable}.")
    if facts.status in (UNAUTHORIZED, FORBIDDEN):
        return failure(f"{facts.variable} is refused, so its own checks are missing: {facts.detail}")
    return unknown(f"it answered {facts.status}, so its own checks are missing: {facts.detail}")


def judge_releases(facts: ReleaseFacts) -> Verdict:
    releases = sorted(set(facts.by_subject.values()))
    if not releases:
        return unknown("no service told its release")
    if len(releases) == 1:
        return passed(f"all run {releases[0]}")
    by_release = (
        f"{release}: {', '.join(sorted(name for name, each in facts.by_subject.items() if each == release))}"
        for release in releases
    )
    text = "; ".join(by_release)
    return failure(text) if len(releases) > MAX_RELEASES else warning(text)


def judge_own_clock(facts: ClockFacts) -> Verdict:
    if facts.ahead is None:
        return unknown("no coordinator told its time")
    seconds = abs(facts.ahead.total_seconds())
    if abs(facts.ahead) <= CLOCK_WARN:
        return passed(f"within {CLOCK_WARN.total_seconds():g} s of the coordinator's")
    return warning(f"{seconds:.1f} s {'ahead of' if facts.ahead > timedelta() else 'behind'} the coordinator's")


HEALTH_CHECK: Check[HealthFacts] = Check(
    "reachable",
    "`/readyz` of a coordinator or an agent; whether a database that is named answers this machine",
    "it is degraded",
    "it does not answer, or is not ready",
    "Look up the reason's code in docs/guides/health.md.",
    judge_health,
)
TLS_CHECK: Check[TlsFacts] = Check(
    "tls",
    "the certificate of a coordinator, an agent or a webhook's host, as this machine verifies it",
    "the connection to another machine is not encrypted, or the certificate expires within three weeks",
    "the certificate cannot be verified, or expires within three days",
    "Renew the certificate, or pass --ca-file for a private authority.",
    judge_tls,
)
ACCESS_CHECK: Check[AccessFacts] = Check(
    "token",
    "whether a service accepts the doctor's token; without it the service's own checks are missing",
    "",
    "the token is refused",
    "Create one with `leasehold token create --scope audit:read --scope admin`; for an agent use its service token.",
    judge_access,
)
RELEASE_CHECK: Check[ReleaseFacts] = Check(
    "releases",
    "the releases of all coordinators and agents that were asked",
    "two releases run: an upgrade is in progress, or was left half done",
    "more than two releases run",
    "Finish the upgrade.",
    judge_releases,
)
CLOCK_CHECK: Check[ClockFacts] = Check(
    "own_clock",
    "the clock of the doctor's machine beside a coordinator's",
    "they differ by more than a second",
    "",
    "Run NTP on this machine: times that you type are by its clock.",
    judge_own_clock,
)
OUTSIDE_CHECKS = (HEALTH_CHECK, TLS_CHECK, ACCESS_CHECK, RELEASE_CHECK, CLOCK_CHECK)
