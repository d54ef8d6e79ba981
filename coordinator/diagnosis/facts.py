"""Facts about a coordinator and its database, as the rules of the checks need them. One that is not known is None."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from protocol.diagnosis.checks import UnknownSetting


class Standby(NamedTuple):
    """A server that replicates the database, as `pg_stat_replication` shows it."""

    name: str | None  # None, like all of it, if the role may not see it
    state: str | None  # streaming, …
    sync_state: str | None  # sync, quorum, potential, async


class ServerFacts(NamedTuple):
    """The database server."""

    version: str
    version_number: int
    settings: Mapping[str, str]  # of SERVER_SETTINGS
    standbys: Sequence[Standby]
    is_standby: bool
    is_encrypted: bool
    is_local: bool
    verifies_certificate: bool  # the address says so
    connections: int
    oldest_transaction_age: int  # in transactions, of the database
    commits_ms: Sequence[float]  # each of a transaction that has to be as durable as any
    clock_ahead_ms: int  # of the clock of the machine that asks, beside the database's
    free_bytes: int | None  # of the disk of its data, where that can be seen
    may_see_statistics: bool  # the role is a member of pg_read_all_stats


class TableSize(NamedTuple):
    name: str
    parts: int  # partitions, or 1
    bytes: int


class SchemaFacts(NamedTuple):
    """The schema and its sizes."""

    revision: str | None
    newest_known: str
    is_behind: bool
    role: str  # that coordinators connect as
    is_superuser: bool
    owns_ledger: bool
    guard_fault: str | None  # the first privilege, trigger or constraint that is not as the migrations made it
    guards_are_known: bool
    sizes: Sequence[TableSize]  # largest first
    transfers_a_day: int | None  # None: the ledger is younger than a day
    transfers: int


class DiskFacts(NamedTuple):
    free_bytes: int | None  # None: it cannot be seen from here
    growth_a_day: int | None  # None: the ledger is younger than a day


class LateJob(NamedTuple):
    name: str
    overdue: timedelta


class WebhookFacts(NamedTuple):
    url: str
    dead: int
    failing: int  # deliveries that failed and are tried again
    is_paused: bool


class RegionFacts(NamedTuple):
    name: str
    silent_for: timedelta | None  # None: it was never heard
    is_down: bool
    has_split_brain: bool
    regressed_lanes: int


class LedgerFacts(NamedTuple):
    """The coordinator's work, as its own tables show it."""

    now: datetime
    sealed_at: datetime | None
    verified_at: datetime | None  # when the last verification that found everything intact ended
    last_verification_fault: str | None
    late_jobs: Sequence[LateJob]
    webhooks: Sequence[WebhookFacts]
    unconfirmed: str | None  # why this may be a copy of the installation
    regions: Sequence[RegionFacts]
    suspense_units: int
    suspense_since: datetime | None  # the oldest report of a lease in suspense


class CoordinatorFacts(NamedTuple):
    """The coordinator itself."""

    unknown_settings: Sequence[UnknownSetting]
    clock_limit_ms: int
    has_installation_name: bool
    has_archive: bool
    log_level: str
    kafka_protocol: str | None = None  # None: decisions are not sent to Kafka
    kafka_finding: str | None = None  # why they do not reach it
