"""Monitor whether this coordinator can serve, for `/readyz`, metrics and logs.

Every ten seconds, every second while it is not ready, and for each request of `/readyz`, a coordinator proves on a
connection of its own that it can read and commit, and compares its clock with the database's. Other requests never wait
for this, nor does it wait for them. A reason is logged when it begins and when it ends.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import NamedTuple

import asyncpg
import structlog

from coordinator.clock import ComparedClock
from coordinator.database.connection import Connection
from coordinator.database.engine import SESSION, Url, connect
from coordinator.database.session import SessionNotKept
from coordinator.decision_log.publisher import DecisionPublisher
from coordinator.health.figures import Measured, read_measured
from coordinator.health.readiness import oldest_release, read_database_clock, schema_revision, write_message
from coordinator.health.seen import SeenAgents
from coordinator.installation.operations import look_at_installation
from coordinator.job_failures import JobFailures
from coordinator.limits.read_limits import read_limits
from coordinator.metrics import CoordinatorMetrics
from coordinator.outages import LimitsNotReadable
from migrations.connect import NoUsableHost
from migrations.revisions import is_behind, known_revisions
from protocol.compatibility.releases import GUIDE, RELEASE, UPGRADE_ORDER, Peer, minor_of
from web.credentials.issuer_keys import IssuerKeys
from web.health import Health, HealthReason, HealthStatus
from web.tls.certificates import Certificates

LOOK_EVERY_S = 10.0
LOOK_AGAIN_S = 1.0  # while the last proof failed
PROVE_WITHIN_S = 2.0
FIGURES_EVERY_S = 10.0
SILENT_AFTER = timedelta(minutes=1)

_log = structlog.get_logger(__name__)


class CoordinatorFinding(NamedTuple):
    code: str
    text: str
    status: HealthStatus = HealthStatus.NOT_READY
    subject: str = ""  # distinguishes findings of one code


class CoordinatorHealth:
    def __init__(
        self,
        url: Url,
        clock: ComparedClock,
        metrics: CoordinatorMetrics,
        failures: JobFailures,
        *,
        clock_warn_ms: int,
        addresses: frozenset[str],
        jwt_keys: IssuerKeys | None = None,
        certificates: Certificates | None = None,
        publisher: DecisionPublisher | None = None,
    ) -> None:
        self._url = url
        self._clock = clock
        self._metrics = metrics
        self._failures = failures
        self._addresses = addresses
        self._jwt_keys = jwt_keys
        self._certificates = certificates
        self._publisher = publisher
        self._unconfirmed: str | None = None  # why this may be a copy of the installation
        self._clock_warn_ms = clock_warn_ms
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._in_use = asyncio.Lock()  # a connection does one thing at a time
        self._looking: asyncio.Task[None] | None = None
        self._has_read_limits = False  # those that were in force when the process started
        self._database: CoordinatorFinding | None = CoordinatorFinding(
            "starting", "the database has not been checked yet"
        )
        self._since: dict[tuple[str, str], datetime] = {}
        self._failed_looks = 0
        self._seen = SeenAgents(clock)
        self._silent: set[str] = set()

    async def run(self) -> None:
        """Check the database, and every ten seconds the shared figures, for ever."""
        clock, share_at_s = asyncio.get_running_loop().time, 0.0
        while True:
            await self.look()
            if clock() >= share_at_s:
                await self.share_and_read()
                share_at_s = clock() + FIGURES_EVERY_S - LOOK_AGAIN_S / 2
            await asyncio.sleep(LOOK_EVERY_S if self._database is None else LOOK_AGAIN_S)

    async def look(self) -> None:
        """Prove that a commit works, within PROVE_WITHIN_S. Concurrent callers share one proof."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    def note_seen(self, region: str, peer: Peer | None) -> None:
        """Note that a token of this region was accepted, and what its agent stated."""
        self._seen.note(region, peer)

    def report(self) -> Health:
        found = list(self._findings())
        reasons = [
            HealthReason(code=each.code, since=self._since_of(each), text=each.text)
            for each in sorted(found, key=lambda each: each.status is not HealthStatus.NOT_READY)
        ]
        return Health(status=_worst_of(found), reasons=reasons)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._drop_connection()

    # --- the database ------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        try:
            self._database = await self._prove()
            if self._database is None:
                self._failed_looks = 0
        finally:
            self._looking = None
        self._failed_looks += self._database is not None
        self._show()

    async def _prove(self) -> CoordinatorFinding | None:
        reads = False
        try:
            async with self._transaction() as connection:
                if finding := await _schema_finding(connection):
                    return finding
                if not self._has_read_limits:
                    await read_limits(connection)
                    self._has_read_limits = True
                asked_at = self._clock.untrusted_now()
                database_now = await read_database_clock(connection)
                self._clock.compare(asked_at, database_now, self._clock.untrusted_now())
                reads = True
                await write_message(connection)
        except LimitsNotReadable as error:
            return CoordinatorFinding("limits_not_readable", str(error))
        except Exception as error:  # of any kind: it cannot commit now
            self._drop_connection()
            return _finding_of(error, reads=reads)
        return None

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        """Begin a transaction that ends within PROVE_WITHIN_S, or raises TimeoutError.

        It is ended by closing the connection: to cancel a statement, or to roll back, waits for a server that hangs.
        """
        async with self._in_use:
            connection, is_late = await self._connected(), False

            def end() -> None:
                nonlocal is_late
                is_late = True
                connection.terminate()

            timer = asyncio.get_running_loop().call_later(PROVE_WITHIN_S, end)
            try:
                async with connection.transaction():
                    yield connection
            except Exception as error:
                if is_late:
                    raise TimeoutError from error
                raise
            finally:
                timer.cancel()

    async def _connected(self) -> "asyncpg.Connection[asyncpg.Record]":
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._url, timeout_s=PROVE_WITHIN_S, server_settings=SESSION)
        return self._connection

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    # --- what coordinators share -------------------------------------------------------------------------------------

    async def share_and_read(self) -> None:
        """Write which regions were seen here, and read the figures that one coordinator measured for all."""
        if self._database is not None:
            return
        seen = self._seen.take()
        try:
            async with self._transaction() as connection:
                await self._seen.write(connection, seen)
                measured = await read_measured(connection)
                installation = await look_at_installation(connection, self._addresses, self._clock.untrusted_now())
        except Exception as error:
            self._drop_connection()
            self._seen.put_back(seen)
            _log.warning("shared figures could not be read", error=type(error).__name__)
        else:
            self._metrics.ledger.show(measured)
            self._show_silence(measured)
            self._unconfirmed = installation.reason

    def _show_silence(self, measured: Measured) -> None:
        silent = {
            name: last_seen_at
            for name, last_seen_at in measured.last_seen_at.items()
            if measured.read_at - last_seen_at > SILENT_AFTER and name not in measured.down
        }
        for name in silent.keys() - self._silent:
            _log.warning("region silent for a minute", region=name, last_seen_at=silent[name].isoformat())
        for name in self._silent - silent.keys():
            _log.info("region reports again", region=name)
        self._silent = set(silent)
        self._metrics.ledger.show_silent_regions(measured.last_seen_at, self._silent)

    # --- what is found -----------------------------------------------------------------------------------------------

    def _findings(self) -> Iterator[CoordinatorFinding]:
        if self._database is not None:
            yield self._database
        reason = self._clock.why_not_trusted
        if reason and not (self._database and self._clock.difference_ms is None):
            yield CoordinatorFinding("clock_differs", reason)
        elif (
            not reason
            and self._clock.is_compared_with_the_database
            and abs(self._clock.difference_ms or 0) > self._clock_warn_ms
        ):
            text = f"the clock differs from the database's by {(self._clock.difference_ms or 0) / 1000:.1f} s"
            yield CoordinatorFinding("clock_drifts", text, HealthStatus.DEGRADED)
        if self._unconfirmed:
            text = f"no webhooks are sent: {self._unconfirmed}; if this is right, run `leasehold installation confirm`"
            yield CoordinatorFinding("installation_unconfirmed", text, HealthStatus.DEGRADED)
        if self._jwt_keys is not None and self._jwt_keys.finding:
            yield CoordinatorFinding("jwt_keys_stale", self._jwt_keys.finding, HealthStatus.DEGRADED)
        if self._publisher is not None and self._publisher.finding:
            yield CoordinatorFinding("kafka_unavailable", self._publisher.finding, HealthStatus.DEGRADED)
        for each in self._certificates.look(self._clock.untrusted_now()) if self._certificates else ():
            yield CoordinatorFinding(each.code, each.text, HealthStatus.DEGRADED, each.use)
        for job, failing in self._failures.in_a_row().items():
            text = f"the job {job!r} failed at least {self._failures.TOO_OFTEN} times in a row: {failing.error}"
            yield CoordinatorFinding("job_failing", text, HealthStatus.DEGRADED, job)

    def _show(self) -> None:
        """Log the findings that began or ended since the last check, and set the metrics."""
        found = {(each.code, each.subject): each for each in self._findings()}
        for key in found.keys() - self._since.keys():
            self._since[key] = self._clock.untrusted_now()
            each = found[key]
            _log.warning("coordinator " + each.status.value.replace("_", " "), code=each.code, reason=each.text)
        for key in self._since.keys() - found.keys():
            since = self._since.pop(key)
            lasted_s = round((self._clock.untrusted_now() - since).total_seconds(), 1)
            _log.info("coordinator recovered", code=key[0], subject=key[1] or None, lasted_s=lasted_s)
        self._metrics.show_health(_worst_of(found.values()) is not HealthStatus.NOT_READY, _severities(found.values()))
        self._metrics.clock_difference.set((self._clock.difference_ms or 0) / 1000)

    def _since_of(self, found: CoordinatorFinding) -> datetime:
        return self._since.get((found.code, found.subject)) or self._clock.untrusted_now()


def _worst_of(found: Iterable[CoordinatorFinding]) -> HealthStatus:
    statuses = {each.status for each in found}
    order = (HealthStatus.NOT_READY, HealthStatus.DEGRADED)
    return next((each for each in order if each in statuses), HealthStatus.READY)


def _severities(found: Iterable[CoordinatorFinding]) -> Mapping[str, str]:
    return {each.code: each.status.value for each in found}


async def _schema_finding(connection: Connection) -> CoordinatorFinding | None:
    """Find a schema of the wrong release. A newer one is right until a step removes what this release needs."""
    revision = await schema_revision(connection)
    if is_behind(revision):
        text = (
            f"the database's schema ({revision or 'none'}) is older than this coordinator (release {RELEASE}), which "
            f"needs {known_revisions()[-1]}: run `leasehold migrate` of this release first. Upgrades go in this order: "
            f"{UPGRADE_ORDER} ({GUIDE})"
        )
        return CoordinatorFinding("schema_behind", text)
    oldest = await oldest_release(connection)
    if oldest is None or minor_of(oldest) <= minor_of(RELEASE):
        return None
    text = (
        f"the database's schema ({revision}) works with release {oldest} and newer, and this coordinator is of release "
        f"{RELEASE}: run a coordinator of release {oldest} ({GUIDE})"
    )
    return CoordinatorFinding("schema_ahead", text)


def _finding_of(error: Exception, *, reads: bool) -> CoordinatorFinding:
    kind = type(error).__name__
    if isinstance(error, SessionNotKept):
        return CoordinatorFinding("database_pooled", str(error))
    if isinstance(error, NoUsableHost):
        return CoordinatorFinding("database_unavailable", str(error))
    if not reads:
        return CoordinatorFinding("database_unavailable", f"Postgres does not answer: {kind}")
    if isinstance(error, TimeoutError):
        kind = f"not within {PROVE_WITHIN_S:g} s; look at its synchronous standby and its disk"
    return CoordinatorFinding("commits_fail", f"Postgres answers, and does not commit: {kind}")
