"""Run the checks of a database and of a coordinator."""

from collections.abc import Sequence
from functools import partial

from msgspec import structs
from pydantic import SecretStr

from coordinator.background import background_jobs
from coordinator.database.connection import Connection, read_sums_as_integers
from coordinator.database.engine import Database, connect
from coordinator.decision_log.publisher import DecisionPublisher
from coordinator.diagnosis.facts import CoordinatorFacts, DiskFacts
from coordinator.diagnosis.read_facts import read_ledger, read_schema, read_server
from coordinator.diagnosis.rules import (
    COORDINATOR_CHECKS,
    DISK_CHECKS,
    LEDGER_CHECKS,
    SCHEMA_CHECKS,
    SERVER_CHECKS,
    growth_a_day,
    judge_installation,
)
from coordinator.installation.operations import look_at_installation
from coordinator.installation.rules import addresses_of
from coordinator.jobs import Job
from coordinator.outages import DatabaseUnavailable, TransactionFailed
from coordinator.settings import CoordinatorSettings
from migrations.roles import COORDINATOR
from protocol.clock import Clock
from protocol.diagnosis.checks import CheckResult, UnknownSetting, judge, unexamined

DATABASE, LEDGER = "database", "ledger"
OF_A_CONNECTION = frozenset({"database_clock", "database_tls"})


async def examine_coordinator(
    database: Database,
    settings: CoordinatorSettings,
    unknown: Sequence[UnknownSetting],
    jobs: Sequence[Job],
    clock: Clock,
    publisher: DecisionPublisher | None = None,
) -> list[CheckResult]:
    """Run the checks of a coordinator and of its database. `unknown`: variables that no setting reads."""
    own = judge(COORDINATOR_CHECKS, _facts_of(settings, unknown, publisher), "coordinator")
    try:
        return [*own, *await database.read(partial(_examine_own, settings=settings, jobs=jobs, clock=clock))]
    except (DatabaseUnavailable, TransactionFailed) as error:
        return [*own, *unexamined_database(f"the database does not answer: {error}")]


def _facts_of(
    settings: CoordinatorSettings, unknown: Sequence[UnknownSetting], publisher: DecisionPublisher | None
) -> CoordinatorFacts:
    return CoordinatorFacts(
        unknown_settings=unknown,
        clock_limit_ms=settings.clock_limit_ms,
        has_installation_name=bool(settings.installation),
        has_archive=bool(settings.archive),
        log_level=settings.log_level,
        kafka_protocol=None if publisher is None else settings.kafka_security_protocol,
        kafka_finding=None if publisher is None else publisher.finding,
    )


async def _examine_own(
    connection: Connection, settings: CoordinatorSettings, jobs: Sequence[Job], clock: Clock
) -> list[CheckResult]:
    url = settings.database_url.get_secret_value()
    found = await examine_database(connection, url, clock)
    installation = await look_at_installation(connection, addresses_of(url, settings.installation), clock.now())
    ledger = await read_ledger(connection, clock.now(), installation.reason, jobs)
    return [*found, *judge(LEDGER_CHECKS, ledger, LEDGER)]


async def examine_database(
    connection: Connection, url: str, clock: Clock, role: str | None = None
) -> list[CheckResult]:
    """Run the checks of a server and of the schema. `role`: that coordinators have, if not the connection's own."""
    server = await read_server(connection, url, clock)
    schema = await read_schema(connection, role, clock.now())
    disk = DiskFacts(server.free_bytes, growth_a_day(schema))
    return [
        *judge(SERVER_CHECKS, server, DATABASE),
        *judge(SCHEMA_CHECKS, schema, DATABASE),
        *judge(DISK_CHECKS, disk, DATABASE),
    ]


def unexamined_database(reason: str) -> list[CheckResult]:
    return [
        *unexamined(SERVER_CHECKS, DATABASE, reason),
        *unexamined(SCHEMA_CHECKS, DATABASE, reason),
        *unexamined(DISK_CHECKS, DATABASE, reason),
        *unexamined(LEDGER_CHECKS, LEDGER, reason),
    ]


async def read_and_examine_database(url: str, clock: Clock, timeout_s: float) -> list[CheckResult]:
    """Run the checks of a database and of the ledger over a connection of its own, for `leasehold doctor`.

    Where the installation was confirmed is a question to coordinators: they know their own addresses.
    """
    connection = await connect(url, timeout_s=timeout_s, server_settings={"application_name": "leasehold-doctor"})
    try:
        await read_sums_as_integers(connection)
        found = list(map(_of_this_connection, await examine_database(connection, url, clock, COORDINATOR)))
        jobs = background_jobs(CoordinatorSettings(database_url=SecretStr(url)), clock)
        checks = [check for check in LEDGER_CHECKS if check.judge is not judge_installation]
        return [*found, *judge(checks, await read_ledger(connection, clock.now(), None, jobs), LEDGER)]
    finally:
        connection.terminate()


def _of_this_connection(found: CheckResult) -> CheckResult:
    """Name this machine as the subject of what its own connection shows: coordinators have others."""
    return structs.replace(found, subject="this machine") if found.check in OF_A_CONNECTION else found
