"""The checks of a coordinator and of its database, as pure rules over facts."""

import re
from datetime import timedelta
from statistics import median

from coordinator.diagnosis.facts import (
    CoordinatorFacts,
    DiskFacts,
    LedgerFacts,
    RegionFacts,
    SchemaFacts,
    ServerFacts,
    WebhookFacts,
)
from protocol.counting import counted
from protocol.diagnosis.checks import Check, Verdict, failure, judge_settings, passed, unknown, warning

COMMIT_WARN_MS, COMMIT_FAIL_MS = 50, 400  # an agent sends an exchange again after 400 ms
CLOCK_WARN_MS = 1_000
CONNECTIONS_WARN, CONNECTIONS_FAIL = 0.8, 0.95
AGE_WARN, AGE_FAIL = 1_000_000_000, 1_800_000_000  # transactions; at 2^31 Postgres accepts none
SEAL_WARN, SEAL_FAIL = timedelta(minutes=3), timedelta(minutes=15)
VERIFY_WARN = timedelta(days=7)
SILENT = timedelta(minutes=1)
SUSPENSE_WARN = timedelta(days=7)
DISK_WARN_DAYS, DISK_FAIL_DAYS = 30, 3
OLDEST_VERSION = 150_000
SHOWN_TABLES = 4
GIB, MIB = 1 << 30, 1 << 20
DURABLE = ("on", "remote_apply")
_QUORUM = re.compile(r"(?:(?:FIRST|ANY)\s+)?(\d+)\s*\(", re.IGNORECASE)


# --- the database server ----------------------------------------------------------------------------------------------


def judge_durability(facts: ServerFacts) -> Verdict:
    off = [name for name in ("fsync", "full_page_writes") if facts.settings.get(name) == "off"]
    if off:
        return failure(f"{' and '.join(off)} off: a crash of the server may destroy the ledger")
    commit = facts.settings.get("synchronous_commit", "")
    if commit == "off":
        return failure("synchronous_commit is off: a crash loses commits that regions were told of")
    if commit not in DURABLE and facts.settings.get("synchronous_standby_names"):
        return warning(f"synchronous_commit is {commit}: a commit does not wait until a standby has it on disk")
    return passed(f"fsync on, synchronous_commit {commit}")


def judge_replication(facts: ServerFacts) -> Verdict:
    names = facts.settings.get("synchronous_standby_names", "").strip()
    if facts.is_standby:
        return failure("this server is a standby: nothing can be booked on it")
    if not names:
        return warning(
            f"replication is asynchronous ({counted(len(facts.standbys), 'connected replica')}): a failover may lose"
            " commits that regions were told of"
        )
    needed = int(found[1]) if (found := _QUORUM.match(names)) else 1
    if not facts.may_see_statistics:
        return unknown(
            f"synchronous_standby_names is {names!r}; the role may not see which standbys are connected",
            "GRANT pg_read_all_stats to the coordinators' role, or give the doctor --database-url.",
        )
    there = [each for each in facts.standbys if each.state == "streaming" and each.sync_state not in (None, "async")]
    text = f"{needed} of the standbys {names!r} must confirm a commit, and {len(there)} can"
    if len(there) < needed:
        return failure(f"{text}: commits hang")
    return warning(f"{text}: without any of them commits hang") if len(there) == needed else passed(text)


def judge_commits(facts: ServerFacts) -> Verdict:
    if not facts.commits_ms:
        return unknown("no commit could be measured")
    middle, most = median(facts.commits_ms), max(facts.commits_ms)
    text = f"a commit takes {middle:.1f} ms (at most {most:.1f} of {len(facts.commits_ms)})"
    if middle > COMMIT_FAIL_MS:
        return failure(f"{text}: agents send exchanges again before they are booked")
    return warning(text) if middle > COMMIT_WARN_MS else passed(text)


def judge_database_clock(facts: ServerFacts) -> Verdict:
    ahead = facts.clock_ahead_ms
    if abs(ahead) <= CLOCK_WARN_MS:
        return passed(f"within {CLOCK_WARN_MS / 1000:g} s of the database's")
    return warning(f"{abs(ahead) / 1000:.1f} s {'ahead of' if ahead > 0 else 'behind'} the database's")


def judge_connections(facts: ServerFacts) -> Verdict:
    most = int(facts.settings.get("max_connections", "0"))
    if not most:
        return unknown("max_connections is not shown")
    text = f"{facts.connections} of {most} connections are open"
    if facts.connections >= CONNECTIONS_FAIL * most:
        return failure(text)
    return warning(text) if facts.connections >= CONNECTIONS_WARN * most else passed(text)


def judge_transaction_age(facts: ServerFacts) -> Verdict:
    text = f"the oldest transaction that is not frozen is {facts.oldest_transaction_age:,} transactions old"
    if facts.oldest_transaction_age > AGE_FAIL:
        return failure(text)
    return warning(text) if facts.oldest_transaction_age > AGE_WARN else passed(text)


def judge_database_tls(facts: ServerFacts) -> Verdict:
    if facts.is_local:
        return passed("on this machine")
    if not facts.is_encrypted:
        return warning("the connection is not encrypted: the ledger and the password cross the network in clear")
    if not facts.verifies_certificate:
        return warning("the connection is encrypted, and the server's certificate is not verified")
    return passed("encrypted, and the certificate is verified")


def judge_database_version(facts: ServerFacts) -> Verdict:
    is_old = facts.version_number < OLDEST_VERSION
    return warning(f"PostgreSQL {facts.version}") if is_old else passed(f"PostgreSQL {facts.version}")


SERVER_CHECKS: tuple[Check[ServerFacts], ...] = (
    Check(
        "database_durability",
        "`fsync`, `full_page_writes` and `synchronous_commit`",
        "there are synchronous standbys, and commits do not wait for their disks",
        "a crash of the server may lose commits or destroy data",
        "Set fsync, full_page_writes and synchronous_commit to on.",
        judge_durability,
    ),
    Check(
        "database_replication",
        "`synchronous_standby_names`, how many standbys have to confirm a commit, and how many can",
        "replication is asynchronous, or commits hang as soon as one more standby is gone",
        "too few standbys are connected, so that commits hang; or the server is itself a standby",
        "Run one standby more than must confirm, such as ANY 1 (a, b); see docs/guides/production.md#postgresql.",
        judge_replication,
    ),
    Check(
        "database_commits",
        "the time of five commits that wait for the disk and the standbys",
        f"half of them take longer than {COMMIT_WARN_MS} ms",
        f"half of them take longer than {COMMIT_FAIL_MS} ms, after which agents send an exchange again",
        "Look at the database's disk and at the network to its synchronous standby.",
        judge_commits,
    ),
    Check(
        "database_clock",
        "the clock of the machine that asks beside the database's",
        "they differ by more than a second",
        "",
        "Run NTP on both machines; see docs/guides/operations.md#clocks.",
        judge_database_clock,
    ),
    Check(
        "database_connections",
        "connections in use, of `max_connections`",
        "four fifths are in use",
        "95 % are in use",
        "Raise max_connections, or lower LEASEHOLD_COORDINATOR_DATABASE_POOL_SIZE.",
        judge_connections,
    ),
    Check(
        "database_age",
        "the age of the oldest transaction that VACUUM has not frozen",
        "it is a thousand million transactions old",
        "it is close to where PostgreSQL accepts no more transactions",
        "Look at autovacuum, and for a transaction, a replication slot or a prepared transaction that is left open.",
        judge_transaction_age,
    ),
    Check(
        "database_tls",
        "whether the connection to a database on another machine is encrypted, and its certificate verified",
        "it is not",
        "",
        "Add ?sslmode=verify-full&sslrootcert=… to LEASEHOLD_COORDINATOR_DATABASE_URL.",
        judge_database_tls,
    ),
    Check(
        "database_version",
        "the version of PostgreSQL",
        "it is older than 15, which the tests do not cover",
        "",
        "Upgrade PostgreSQL.",
        judge_database_version,
    ),
)


# --- the schema -------------------------------------------------------------------------------------------------------


def judge_schema(facts: SchemaFacts) -> Verdict:
    if facts.revision is None:
        return failure("the database has no schema", "Run `leasehold migrate`.")
    if facts.is_behind:
        return failure(f"revision {facts.revision}, and this release needs {facts.newest_known}")
    newer = f", newer than this release's {facts.newest_known}" if facts.revision != facts.newest_known else ""
    return passed(f"revision {facts.revision}{newer}")


def judge_role(facts: SchemaFacts) -> Verdict:
    if facts.is_superuser:
        return failure(f"coordinators connect as {facts.role}, a superuser")
    if facts.owns_ledger:
        return failure(f"coordinators connect as {facts.role}, the owner of the ledger, who may change what is booked")
    if facts.guard_fault:
        return failure(facts.guard_fault)
    if not facts.guards_are_known:
        return unknown(f"this release does not know the guards of revision {facts.revision}")
    return passed(f"{facts.role} may append to the ledger and not change it; every guard is as the migrations made it")


def judge_size(facts: SchemaFacts) -> Verdict | None:
    total = sum(each.bytes for each in facts.sizes)
    largest = ", ".join(
        f"{each.name} {_size(each.bytes)}{f' in {each.parts} partitions' if each.parts > 1 else ''}"
        for each in facts.sizes[:SHOWN_TABLES]
    )
    growth = growth_a_day(facts)
    growing = "younger than a day" if growth is None else f"grows by {_size(growth)} a day"
    return passed(f"{_size(total)} ({largest}); {growing}")


def growth_a_day(facts: SchemaFacts) -> int | None:
    """Return the bytes that the ledger grew by in the last day, by its bytes for each transfer."""
    if facts.transfers_a_day is None or not facts.transfers:
        return None
    return sum(each.bytes for each in facts.sizes) * facts.transfers_a_day // facts.transfers


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


SCHEMA_CHECKS: tuple[Check[SchemaFacts], ...] = (
    Check(
        "database_schema",
        "the revision of the schema",
        "",
        "there is none, or it is older than the release",
        "Run `leasehold migrate` as the owner of the schema.",
        judge_schema,
    ),
    Check(
        "database_role",
        "the role of coordinators, and each privilege, trigger and constraint that keeps the ledger append-only",
        "",
        "the role may change what is booked, or a guard is missing",
        "Let coordinators connect as members of leasehold_coordinator, and migrate; see docs/guides/security.md.",
        judge_role,
    ),
    Check(
        "database_size",
        "the size of the largest tables with their indexes, partitions together, and their growth in the last day",
        "",
        "",
        "Archive closed periods; see docs/guides/retention.md.",
        judge_size,
    ),
)


def judge_disk(facts: DiskFacts) -> Verdict:
    free, growth = facts
    if free is None:
        return unknown(
            "PostgreSQL does not tell the free space of its disk",
            "Alert on it, and compare it with the growth in `database_size`; or run this on the database's machine.",
        )
    days = free // growth if growth else None
    lasting = "" if days is None else f", enough for {counted(days, 'day')} at the last day's growth"
    text = f"{_size(free)} are free{lasting}"
    if free < GIB // 4 or (days is not None and days < DISK_FAIL_DAYS):
        return failure(text)
    return warning(text) if free < GIB or (days is not None and days < DISK_WARN_DAYS) else passed(text)


DISK_CHECKS: tuple[Check[DiskFacts], ...] = (
    Check(
        "database_disk",
        "the free space of the database's disk, if the doctor runs on its machine, beside the growth of a day",
        f"it lasts less than {DISK_WARN_DAYS} days, or is less than 1 GiB",
        f"it lasts less than {DISK_FAIL_DAYS} days, or is less than 256 MiB",
        "Enlarge the disk, or archive closed periods; see docs/guides/retention.md.",
        judge_disk,
    ),
)


# --- the ledger's own work --------------------------------------------------------------------------------------------


def judge_seals(facts: LedgerFacts) -> Verdict:
    if facts.sealed_at is None:
        return warning("nothing is sealed yet")
    age = facts.now - facts.sealed_at
    text = f"the newest seal is {_age(age)} old"
    if age > SEAL_FAIL:
        return failure(text)
    return warning(text) if age > SEAL_WARN else passed(text)


def judge_verification(facts: LedgerFacts) -> Verdict:
    if facts.last_verification_fault:
        return failure(f"the last verification found: {facts.last_verification_fault}", "See docs/guides/auditing.md.")
    if facts.verified_at is None:
        return warning("the ledger was never verified")
    age = facts.now - facts.verified_at
    text = f"verified {_age(age)} ago"
    return warning(text) if age > VERIFY_WARN else passed(text)


def judge_jobs(facts: LedgerFacts) -> Verdict:
    if not facts.late_jobs:
        return passed("every job runs when it is due")
    late = ", ".join(f"{each.name} for {_age(each.overdue)}" for each in facts.late_jobs)
    return failure(f"no coordinator has run what was due: {late}")


def judge_webhooks(facts: LedgerFacts) -> Verdict:
    if not facts.webhooks:
        return passed("there are none")
    problems = [problem for each in facts.webhooks for problem in _problems(each)]
    return warning("; ".join(problems)) if problems else passed(f"{counted(len(facts.webhooks), 'webhook')} deliver")


def _problems(webhook: WebhookFacts) -> list[str]:
    counts = ((webhook.dead, "dead"), (webhook.failing, "failed and tried again"))
    found = [f"{webhook.url}: {count} {what}" for count, what in counts if count]
    return found + ([f"{webhook.url}: paused"] if webhook.is_paused else [])


def judge_installation(facts: LedgerFacts) -> Verdict:
    if facts.unconfirmed:
        return warning(f"no webhooks are sent: {facts.unconfirmed}")
    return passed("this database is the installation that was confirmed")


def judge_regions(facts: LedgerFacts) -> Verdict:
    grave = [f"{each.name}: {problem}" for each in facts.regions if (problem := _grave(each))]
    if grave:
        return failure("; ".join(grave))
    silent = [f"{each.name}: {_silence(each)}" for each in facts.regions if _is_silent(each)]
    if silent:
        return warning("; ".join(silent))
    if not facts.regions:
        return unknown("there is no region yet")
    return passed(f"{counted(len(facts.regions), 'region')} heard in the last minute")


def _is_silent(region: RegionFacts) -> bool:
    return not region.is_down and (region.silent_for is None or region.silent_for > SILENT)


def _grave(region: RegionFacts) -> str:
    if region.has_split_brain:
        return "two stores answer under its name"
    return f"{counted(region.regressed_lanes, 'lane')} waiting for a rebase" if region.regressed_lanes else ""


def _silence(region: RegionFacts) -> str:
    return "never heard" if region.silent_for is None else f"not heard for {_age(region.silent_for)}"


def judge_suspense(facts: LedgerFacts) -> Verdict:
    if not facts.suspense_units or facts.suspense_since is None:
        return passed("nothing waits for people")
    age = facts.now - facts.suspense_since
    text = f"{counted(facts.suspense_units, 'unit')} in suspense, the oldest for {_age(age)}"
    return warning(text) if age > SUSPENSE_WARN else passed(text)


def _age(age: timedelta) -> str:
    seconds = max(0, round(age.total_seconds()))
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * length:
            return counted(seconds // length, unit)
    return f"{seconds} s"


LEDGER_CHECKS: tuple[Check[LedgerFacts], ...] = (
    Check(
        "seals",
        "the age of the newest seal; one is made every minute",
        "it is older than three minutes, or there is none",
        "it is older than 15 minutes",
        "Look for the job `seal` in the coordinators' logs.",
        judge_seals,
    ),
    Check(
        "verification",
        "when the whole ledger was last found intact",
        "that was more than seven days ago, or never",
        "the last verification found a fault",
        "Run `leasehold verify` once a week; see docs/guides/auditing.md.",
        judge_verification,
    ),
    Check(
        "jobs",
        "when each background job was last due, for all coordinators together",
        "",
        "one was due and no coordinator has run it",
        "Look for `job fails` in the coordinators' logs.",
        judge_jobs,
    ),
    Check(
        "webhooks",
        "deliveries of each webhook that failed or are dead, and webhooks that are paused",
        "there are any",
        "",
        "See `leasehold webhook deliveries ID`; then `webhook replay` or `webhook pause --resume`.",
        judge_webhooks,
    ),
    Check(
        "installation",
        "whether this database is the one that was confirmed, and not a copy",
        "it may be a copy: no webhooks are sent",
        "",
        "If it is the installation, run `leasehold installation confirm`.",
        judge_installation,
    ),
    Check(
        "regions",
        "when each region was last heard, its stores and its lanes",
        "a region that is not `down` was not heard for a minute",
        "two stores answer under one name, or lanes wait for a rebase",
        "See docs/guides/recovery.md#stopped-lanes and docs/guides/regions.md#two-stores-under-one-region-name.",
        judge_regions,
    ),
    Check(
        "suspense",
        "units in suspense, and since when",
        "some have been there for more than a week",
        "",
        "Resolve them; see docs/guides/recovery.md#suspense-step-by-step.",
        judge_suspense,
    ),
)


# --- the coordinator --------------------------------------------------------------------------------------------------


def judge_clock_settings(facts: CoordinatorFacts) -> Verdict:
    if not facts.clock_limit_ms:
        return warning("LEASEHOLD_COORDINATOR_CLOCK_LIMIT_MS is 0: a wrong clock decides about periods and leases")
    return passed(f"it decides nothing if its clock differs by more than {facts.clock_limit_ms / 1000:g} s")


def judge_installation_name(facts: CoordinatorFacts) -> Verdict:
    if facts.has_installation_name:
        return passed("the installation has a name")
    return warning("LEASEHOLD_COORDINATOR_INSTALLATION is not set: a copy at the same address would send webhooks")


def judge_archive(facts: CoordinatorFacts) -> Verdict:
    if facts.has_archive:
        return passed("closed periods can be archived")
    return passed("LEASEHOLD_COORDINATOR_ARCHIVE is not set: lines of closed periods stay in the database")


def judge_coordinator_log(facts: CoordinatorFacts) -> Verdict:
    is_debug = facts.log_level == "debug"
    return warning("the log level is debug") if is_debug else passed(f"the log level is {facts.log_level}")


def judge_kafka(facts: CoordinatorFacts) -> Verdict:
    if facts.kafka_protocol is None:
        return passed("decisions are not sent to Kafka")
    if facts.kafka_finding is not None:
        return failure(facts.kafka_finding)
    if facts.kafka_protocol.endswith("plaintext"):
        return warning(f"decisions go to Kafka by {facts.kafka_protocol}: not encrypted")
    return passed("Kafka takes the decision log")


COORDINATOR_CHECKS: tuple[Check[CoordinatorFacts], ...] = (
    Check(
        "coordinator_settings",
        "variables that begin with `LEASEHOLD_COORDINATOR_`",
        "no setting reads one of them",
        "",
        "Correct or remove the variable: it has no effect.",
        lambda facts: judge_settings(facts.unknown_settings),
    ),
    Check(
        "coordinator_clock_limit",
        "`LEASEHOLD_COORDINATOR_CLOCK_LIMIT_MS`",
        "the comparison with the database's clock is disabled",
        "",
        "Leave it at its default of 5,000.",
        judge_clock_settings,
    ),
    Check(
        "coordinator_installation_name",
        "`LEASEHOLD_COORDINATOR_INSTALLATION`",
        "it is not set",
        "",
        "Give each environment a name, such as production.",
        judge_installation_name,
    ),
    Check(
        "coordinator_archive",
        "`LEASEHOLD_COORDINATOR_ARCHIVE`",
        "",
        "",
        "",
        judge_archive,
    ),
    Check(
        "coordinator_log",
        "the log level",
        "it is `debug`",
        "",
        "Set LEASEHOLD_COORDINATOR_LOG_LEVEL=info in production.",
        judge_coordinator_log,
    ),
    Check(
        "coordinator_kafka",
        "the decision log in Kafka",
        "it is not encrypted",
        "Kafka does not take it",
        "See LeaseholdDecisionsNotInKafka in the runbook; set LEASEHOLD_COORDINATOR_KAFKA_SECURITY_PROTOCOL to ssl or "
        "sasl_ssl.",
        judge_kafka,
    ),
)
