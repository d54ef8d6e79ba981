"""Facts about a store and an agent, as the rules of the checks need them. A fact that could not be learned is None."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.diagnosis.checks import UnknownSetting


class DecisionTimes(NamedTuple):
    """The times that decisions in the store take, and that a request waits for one, in milliseconds."""

    p99_ms: float
    set_ms: int  # LEASEHOLD_AGENT_DECISION_TIMEOUT_MS
    most_ms: int  # LEASEHOLD_AGENT_DECISION_TIMEOUT_MAX_MS
    measured: int  # round trips


class StoreFacts(NamedTuple):
    """One server of a store."""

    is_single: bool  # without sentinels, and no node of a Cluster
    is_encrypted: bool
    is_local: bool
    info: Mapping[str, str]  # the fields of INFO
    config: Mapping[str, str] | None  # what CONFIG GET shows; None: the store does not allow it
    is_exempt: bool  # it flushes each write, and can prove it
    vouches_for_noeviction: bool
    clock_ahead_ms: int | None  # of this machine's clock, less the round trip
    times: DecisionTimes | None


class AgentFacts(NamedTuple):
    """The agent itself."""

    unknown_settings: Sequence[UnknownSetting]
    has_state_dir: bool
    has_journal: bool
    journal_free_bytes: int | None  # of its file system
    journal_max_bytes: int
    coordinator_urls: Sequence[str]
    exchange_ms: int  # round trip of the latest exchange; 0 before the first
    longest_wait_ms: int  # an exchange never waits longer for its reply
    log_level: str
