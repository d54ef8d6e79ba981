"""The agent's metrics, with a registry for each app.

What every check adds to is kept in plain numbers, and becomes samples when it is scraped.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF

from protocol.check import PolicyAnswer
from protocol.circuit_breaker import BreakerState
from protocol.compatibility.releases import RELEASE
from protocol.limits.document import QuotaKind
from regional_agent.admission.denial_lines import DenialLines
from regional_agent.admission.rules.modes import REFUND
from regional_agent.leasing.rules.addresses import Addresses
from regional_agent.leasing.rules.demand import HotKey
from regional_agent.store.call_statistics import StoreCallStatistics
from regional_agent.store.library import StoreLibrary, idle_libraries
from regional_agent.store.sources import shipped_library
from regional_agent.store.types import PartitionState
from web.declared_metrics import DeclaredMetrics, counter, gauge, histogram, states, total
from web.metrics import WAIT_BUCKETS_S, Durations, describe_process
from web.traces.context import TraceMetrics

MAX_HOT_KEYS = 10  # at a time: a key names a tenant, and most keys are of no interest to a monitor
HOT_MILLI = 100_000
CHECK_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, *WAIT_BUCKETS_S)
EXCHANGE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, INF)
REMAINING_BUCKETS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
SAMPLED_EVERY = 16  # checks: to note what remains costs a few percent of a check that needs no store
ANSWERS = ("allowed", "denied", "shadow_allowed", "shadow_denied")


class CheckCounts(Collector):
    """Checks by policy and answer, and how long they took."""

    def __init__(self) -> None:
        self.counts: dict[str, defaultdict[tuple[str, str], int]] = {answer: defaultdict(int) for answer in ANSWERS}
        self.unmatched: defaultdict[str, int] = defaultdict(int)  # by route class
        self.refunds: defaultdict[str, int] = defaultdict(int)
        self.seconds = Durations(CHECK_BUCKETS_S)
        self.remaining: defaultdict[str, Durations] = defaultdict(lambda: Durations(REMAINING_BUCKETS))
        self._until_sample = SAMPLED_EVERY

    def note(self, answers: Sequence[PolicyAnswer], mode: str) -> None:
        if mode == REFUND:
            self._note_refunds(answers)
            return
        for each in answers:
            self.counts[ANSWERS[2 * each.shadow + (not each.allowed)]][each.policy, each.reason or ""] += 1
        self._until_sample -= 1
        if not self._until_sample:
            self._until_sample = SAMPLED_EVERY
            self._note_remaining(answers)

    def _note_remaining(self, answers: Sequence[PolicyAnswer]) -> None:
        """Note which part of each limit remains: of an allowance in all regions, of others in this one."""
        for each in answers:
            whole = each.limit if each.kind == QuotaKind.ALLOWANCE else each.share
            if whole and not each.unlimited:
                self.remaining[each.policy].observe(min(1.0, each.remaining / whole))

    def _note_refunds(self, answers: Iterable[PolicyAnswer]) -> None:
        for each in answers:
            if each.allowed:
                self.refunds[each.policy] += 1

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        checks = CounterMetricFamily(
            "leasehold_checks",
            "Checks decided, by policy, answer and reason of the denial; shadow_: the answer of a shadow policy.",
            labels=("policy", "answer", "reason"),
        )
        for answer, counts in self.counts.items():
            for (policy, reason), count in counts.items():
                checks.add_metric((policy, answer, reason), count)
        yield checks
        unmatched = CounterMetricFamily(
            "leasehold_unmatched_checks", "Checks that no enforced policy matches.", labels=("route_class",)
        )
        for route_class, count in self.unmatched.items():
            unmatched.add_metric((route_class,), count)
        yield unmatched
        refunds = CounterMetricFamily("leasehold_refunds", "Refunds of rates, by policy.", labels=("policy",))
        for policy, count in self.refunds.items():
            refunds.add_metric((policy,), count)
        yield refunds
        seconds = HistogramMetricFamily(
            "leasehold_check_duration_seconds", "Time to decide a check, including waits for a lease.", labels=()
        )
        self.seconds.add_to(seconds, ())
        yield seconds
        remaining = HistogramMetricFamily(
            "leasehold_remaining_ratio",
            f"Part of the limit that remained, by policy: a sample of one in {SAMPLED_EVERY} checks.",
            labels=("policy",),
        )
        for policy, ratios in self.remaining.items():
            ratios.add_to(remaining, (policy,))
        yield remaining


class JournalMetrics(DeclaredMetrics):
    stored = gauge("leasehold_outage_journal_bytes", "Bytes of the outage journal on disk that are not booked yet.")
    units = counter("leasehold_outage_journal_units", "Units of allowances admitted while the store was unavailable.")
    booked = counter("leasehold_outage_journal_booked_units", "Units of the outage journal that are booked.")
    charged = counter(
        "leasehold_outage_journal_duplicate_operations",
        "Operations of the outage journal that were not booked, because the store had charged them.",
    )
    flushes = counter("leasehold_outage_journal_flushes", "Writes of the outage journal that were flushed to disk.")
    failures = counter(
        "leasehold_outage_journal_write_failures",
        "Failed writes of the outage journal, after which allowances fail closed.",
    )


class EpochMetrics(DeclaredMetrics):
    current = gauge("leasehold_epoch", "The current epoch; 0 if there is none.")
    lost = counter("leasehold_epochs_lost", "Epochs that ended because their store had lost data.")
    _refused = gauge("leasehold_epoch_refused", "1: the reason why the coordinator last opened no epoch.", "reason")

    def refused(self, reason: str) -> None:
        """Show why the last attempt to open an epoch failed; an empty string means that it succeeded."""
        self._refused.clear()
        if reason:
            self._refused.labels(reason).set(1)


class PartitionMetrics(DeclaredMetrics):
    _partitioned = gauge("leasehold_partitioned", "1: no answer from the coordinator for five seconds.")
    _overdraft = total(
        "leasehold_overdraft_units",
        "Units of allowances admitted beyond leases during partitions, in the region since its store began.",
    )

    def show(self, state: PartitionState) -> None:
        self._partitioned.set(state.is_partitioned)
        self._overdraft.set(state.overdrawn)

    def reached_coordinator(self) -> None:
        self._partitioned.set(0)


class StoreCallMetrics(Collector):
    """Round trips of calls of the store: of decisions, which requests wait for, and of all others."""

    def __init__(self, registry: CollectorRegistry, statistics: StoreCallStatistics) -> None:
        self._statistics = statistics
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        self._statistics.read_decisions()
        seconds = HistogramMetricFamily(
            "leasehold_store_call_duration_seconds",
            "Round trip of calls of the store, including those that timed out and were answered later.",
            labels=("kind",),
        )
        for kind, durations in (("decision", self._statistics.decisions), ("other", self._statistics.others)):
            durations.add_to(seconds, (kind,))
        yield seconds
        errors = CounterMetricFamily(
            "leasehold_store_errors",
            "Failed calls of the store: timeout, connection_lost, not_connected, or the code of the store's error.",
            labels=("kind",),
        )
        for kind, count in self._statistics.failures.items():
            errors.add_metric((kind,), count)
        yield errors
        yield GaugeMetricFamily(
            "leasehold_store_decision_timeout_seconds",
            "Time-out of a decision in the store: as configured, or more where the store is slower.",
            self._statistics.decision_timeout.seconds,
        )


class HeadroomMetrics(DeclaredMetrics):
    _dry_in = gauge(
        "leasehold_lease_dry_in_seconds",
        "Time until a quota's first lease is spent at its demand, or expires, without another grant: the shortest 20.",
        "quota",
    )

    def show(self, dry_in_s: Mapping[str, float]) -> None:
        self._dry_in.clear()
        for quota, seconds in dry_in_s.items():
            self._dry_in.labels(quota).set(seconds)


class ConfigurationMetrics(DeclaredMetrics):
    _age = gauge(
        "leasehold_feed_age_seconds",
        "Time since the coordinator last confirmed that what is in force is the newest. It does so every 20 s.",
        "feed",
    )
    policies = gauge("leasehold_policies", "Policies in force.")
    keys = gauge("leasehold_quota_keys", "Keys of rates, slots and allowances that this agent remembers.")
    followed = gauge("leasehold_allowances_followed", "Keys of allowances that this agent follows, with leases or not.")

    def show_ages(self, ages_s: Mapping[str, float]) -> None:
        self._age.clear()
        for feed, age_s in ages_s.items():
            self._age.labels(feed).set(age_s)


class LibraryMetrics(DeclaredMetrics):
    _loads = total("leasehold_store_library_loads", "Times that the agent loaded its function library into a store.")
    _idle = gauge(
        "leasehold_store_library_idle_seconds",
        "Time since an agent last used each function library in the store; `own`: this agent uses it.",
        "library",
        "own",
    )

    def show(self, libraries: Iterable[StoreLibrary]) -> None:
        libraries = list(libraries)
        self._loads.set(sum(each.loads for each in libraries))
        self._idle.clear()
        own = libraries[0].library.name
        for name, idle_s in idle_libraries(libraries).items():
            self._idle.labels(name, str(name == own).lower()).set(idle_s)


class CoordinatorAddressMetrics(DeclaredMetrics):
    _in_use = gauge("leasehold_coordinator_address_in_use", "1: the coordinator's address that calls go to.", "url")
    _moves = total("leasehold_coordinator_failovers", "Times that the agent left a coordinator's address that failed.")

    def show(self, addresses: Addresses) -> None:
        for each in addresses.known:
            self._in_use.labels(each.url).set(each is addresses.in_use)
        self._moves.set(addresses.moves)


class HotKeyMetrics(DeclaredMetrics):
    _keys = gauge(
        "leasehold_hot_key_units_per_second",
        f"Demand of the hottest quota keys, from {HOT_MILLI // 1000} units a second on.",
        "quota",
    )

    def show(self, keys: Iterable[HotKey]) -> None:
        """Show the hottest keys, and drop the series of those that are no longer among them."""
        self._keys.clear()
        for key in keys:
            if key.demand_milli >= HOT_MILLI:
                self._keys.labels(key.quota).set(key.demand_milli / 1000)


class ProxyQuotaMetrics(DeclaredMetrics):
    """The figures of Envoy's quota protocol at this agent."""

    proxies = gauge("leasehold_quota_proxies", "Proxies that are connected by Envoy's quota protocol (RLQS).")
    buckets = gauge("leasehold_quota_buckets", "Buckets that proxies report.")
    refused_buckets = gauge(
        "leasehold_quota_refused_buckets", "Buckets that are denied because their policy has no parts to assign."
    )
    rates = gauge("leasehold_quota_divided_rates", "Rates that are divided among proxies.")
    reports = total("leasehold_quota_reports", "Reports of buckets that proxies sent.")
    ignored = total("leasehold_quota_ignored_reports", "Reports of buckets beyond the limit of a proxy's buckets.")
    messages = total("leasehold_quota_messages", "Messages with assignments that were sent to proxies.")
    oldest = gauge(
        "leasehold_quota_oldest_assignment_seconds", "Age of the oldest assignment of a proxy that is connected."
    )
    overshoot = gauge(
        "leasehold_quota_overshoot_ratio",
        "What proxies admitted beyond share and burst, as a part of its bound: the highest of all rates so far.",
    )


class RefusalMetrics(DeclaredMetrics):
    items = counter(
        "leasehold_exchange_items_refused",
        "Items of exchanges that the coordinator refused: a lane's batch, a lease request or a share.",
        "kind",
    )
    set_aside = gauge(
        "leasehold_exchange_items_set_aside",
        "Lease requests and shares that are not sent for now, because the coordinator refused them.",
    )
    turned_away = total(
        "leasehold_allowances_not_followed",
        "Times that an allowance got no lease because the agent follows the maximum number of allowances.",
    )


class AgentMetrics(DeclaredMetrics):
    degraded = counter(
        "leasehold_outage_fallback_checks",
        "Checks answered without the store, by policy and on_store_failure mode.",
        "policy",
        "mode",
    )
    degraded_entries = counter("leasehold_store_circuit_breaker_opened", "Times that the store circuit breaker opened.")
    degraded_seconds = total(
        "leasehold_store_circuit_breaker_open_seconds", "Time that the store circuit breaker has been open."
    )
    breaker = states(
        "leasehold_store_circuit_breaker",
        "State of the store circuit breaker: closed, open, or half_open while a probe is under way.",
        list(BreakerState),
    )
    holds = counter("leasehold_hold_actions", "Actions on holds, by outcome.", "action", "outcome")
    waits = counter("leasehold_lease_waits", "Checks that waited for units of a lease.")
    exchanges = counter("leasehold_exchanges", "Exchanges with the coordinator, by outcome.", "outcome")
    exchange_failures = counter("leasehold_exchange_failures", "Failed calls of the coordinator.")
    exchange_seconds = histogram(
        "leasehold_exchange_duration_seconds", "Round trip of an exchange.", buckets=EXCHANGE_BUCKETS_S
    )
    stopped_lanes = gauge("leasehold_stopped_lanes", "Lanes that stopped until an operator resolves their fault.")
    exchanges_failing = gauge(
        "leasehold_exchanges_failing_seconds",
        "Time for which the coordinator has answered no exchange; 0 while it answers.",
    )
    unreported_seconds = gauge(
        "leasehold_unreported_usage_age_seconds", "Age of the oldest usage that is not booked, of what is due first."
    )
    policy_version = gauge("leasehold_policy_version", "Version of the policies in force.")
    block_version = gauge("leasehold_block_list_version", "Version of the block list in force.")
    blocked = counter("leasehold_blocked_checks", "Checks denied by a block, by the field that it blocks.", "field")
    resets = counter("leasehold_resets", "Quota keys that this agent has reset in its region's store.")
    store_calls = total("leasehold_store_commands", "Commands sent to the store.")

    def __init__(self, store_calls: StoreCallStatistics | None = None) -> None:
        self.registry = CollectorRegistry()
        super().__init__(self.registry)
        describe_process(self.registry, version=RELEASE, store_library=shipped_library().name)
        self.checks = CheckCounts()
        self.registry.register(self.checks)
        self.journal = JournalMetrics(self.registry)
        self.denial_lines = DenialLines(self.registry)
        if store_calls is not None:
            StoreCallMetrics(self.registry, store_calls)
        self.traces = TraceMetrics(self.registry)
        self.headroom = HeadroomMetrics(self.registry)
        self.configuration = ConfigurationMetrics(self.registry)
        self.library = LibraryMetrics(self.registry)
        self.refusals = RefusalMetrics(self.registry)
        self.proxy_quotas = ProxyQuotaMetrics(self.registry)
        self.epochs = EpochMetrics(self.registry)
        self.partition = PartitionMetrics(self.registry)
        self.hot_keys = HotKeyMetrics(self.registry)
        self.coordinator_addresses = CoordinatorAddressMetrics(self.registry)
