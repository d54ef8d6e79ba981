"""What the agent counts. One registry for each app, so that two in one process do not meet.

What every check adds to is kept in plain numbers, and becomes samples when somebody looks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from protocol.check import PolicyAnswer
from protocol.circuit_breaker import BreakerState
from regional_agent.admission.decision_log import DecisionLog
from regional_agent.leasing.quotas import HotKey
from regional_agent.store.rules.decision_timeout import DecisionTimeout
from regional_agent.store.types import PartitionState
from web.metrics import Durations

MOST_HOT_KEYS = 10  # at a time: a key names whoever is limited, and most are of no interest to a monitor
HOT_MILLI = 100_000
CHECK_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 2.5)


ANSWERS = ("allowed", "denied", "shadow_allowed", "shadow_denied")


class CheckCounts(Collector):
    def __init__(self) -> None:
        self.counts: dict[str, defaultdict[tuple[str, str], int]] = {answer: defaultdict(int) for answer in ANSWERS}
        self.seconds = Durations(CHECK_BUCKETS_S)

    def note(self, answers: Iterable[PolicyAnswer]) -> None:
        for each in answers:
            self.counts[ANSWERS[2 * each.shadow + (not each.allowed)]][each.policy, each.reason or ""] += 1

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        checks = CounterMetricFamily(
            "leasehold_checks",
            "Requests decided, by policy, answer and the reason of a denial; shadow_…: what one in shadow would have"
            " answered.",
            labels=("policy", "answer", "reason"),
        )
        for answer, counts in self.counts.items():
            for (policy, reason), count in counts.items():
                checks.add_metric((policy, answer, reason), count)
        yield checks
        seconds = HistogramMetricFamily(
            "leasehold_check_seconds", "Time to decide one request, waiting for a last unit included.", labels=()
        )
        self.seconds.add_to(seconds, ())
        yield seconds


class JournalMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.units = Counter(
            "leasehold_journal_units", "Units of allowances admitted without the store.", registry=registry
        )
        self.booked = Counter("leasehold_journal_booked_units", "Of these, units that are booked.", registry=registry)
        self.charged = Counter(
            "leasehold_journal_operations_charged_by_store",
            "Operations of the journal that were not booked from it, for the store had charged them.",
            registry=registry,
        )
        self.flushes = Counter(
            "leasehold_journal_flushes", "Times that the journal was written and flushed.", registry=registry
        )
        self.failures = Counter(
            "leasehold_journal_failures",
            "Times that the journal took nothing, so that allowances failed closed.",
            registry=registry,
        )


class EpochMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.current = Gauge("leasehold_epoch", "The current epoch; 0 while there is none.", registry=registry)
        self.lost = Counter(
            "leasehold_lost_epochs", "Epochs that ended because their store had lost data.", registry=registry
        )
        self._refused = Gauge(
            "leasehold_epoch_refused", "1: why the coordinator last opened no epoch.", ["refusal"], registry=registry
        )

    def refused(self, refusal: str) -> None:
        """Nothing: it was not."""
        self._refused.clear()
        if refusal:
            self._refused.labels(refusal).set(1)


class CutOffMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._is_so = Gauge(
            "leasehold_cut_off", "1: the region has not heard the coordinator for five seconds.", registry=registry
        )
        self._overdrawn = Gauge(
            "leasehold_overdrawn_units",
            "Units of allowances that the region admitted beyond its leases while cut off, since its store began.",
            registry=registry,
        )

    def show(self, cut_off: PartitionState) -> None:
        self._is_so.set(cut_off.is_partitioned)
        self._overdrawn.set(cut_off.overdrawn)

    def heard(self) -> None:
        self._is_so.set(0)


class StoreLatencyMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Gauge(
            "leasehold_store_decision_seconds",
            "Round trip of recent decisions in the store, late ones as well.",
            ["quantile"],
            registry=registry,
        )
        self._timeout = Gauge(
            "leasehold_decision_timeout_seconds",
            "How long a request waits for the store: what is set, or more where the store is slower.",
            registry=registry,
        )

    def show(self, timeout: DecisionTimeout) -> None:
        for percent in (50, 99):
            self._seconds.labels(f"0.{percent}").set(timeout.quantile_s(percent))
        self._timeout.set(timeout.seconds)


class HotKeyMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._keys = Gauge(
            "leasehold_hot_key_units_per_second",
            f"What is asked for most, of keys that are asked for {HOT_MILLI // 1000} units a second or more.",
            ["quota"],
            registry=registry,
        )

    def show(self, keys: Iterable[HotKey]) -> None:
        """Those that are not named any more are no series any more."""
        self._keys.clear()
        for key in keys:
            if key.demand_milli >= HOT_MILLI:
                self._keys.labels(key.quota).set(key.demand_milli / 1000)


class RefusalMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.items = Counter(
            "leasehold_refused_items",
            "Parts of messages that the coordinator refused as they are: a lane's batch, a want, or a share.",
            ["kind"],
            registry=registry,
        )
        self.set_aside = Gauge(
            "leasehold_set_aside_items",
            "Wants and shares that are not offered to the coordinator for now, for it refused them.",
            registry=registry,
        )
        self.turned_away = Gauge(
            "leasehold_turned_away",
            "Times that an allowance was not followed, and got no lease, for the agent follows too many.",
            registry=registry,
        )


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.checks = CheckCounts()
        self.registry.register(self.checks)
        self.degraded = Counter(
            "leasehold_degraded_checks",
            "Requests answered without the store, by policy and failure mode.",
            ["policy", "mode"],
            registry=self.registry,
        )
        self.journal = JournalMetrics(self.registry)
        self.decision_log = DecisionLog(self.registry)
        self.store_latency = StoreLatencyMetrics(self.registry)
        self.degraded_entries = Counter(
            "leasehold_degraded_entries", "Times that the store began to be left alone.", registry=self.registry
        )
        self.degraded_seconds = Gauge(
            "leasehold_degraded_seconds", "How long the store was left alone, in all.", registry=self.registry
        )
        self.breaker = Enum(
            "leasehold_store_breaker",
            "Whether the store is asked: closed, open, or half_open while one call tries.",
            states=list(BreakerState),
            registry=self.registry,
        )
        self.holds = Counter(
            "leasehold_holds",
            "What services said of holds, and what came of it.",
            ["action", "outcome"],
            registry=self.registry,
        )
        self.waits = Counter("leasehold_waits", "Requests that waited for a lease.", registry=self.registry)
        self.exchanges = Counter(
            "leasehold_exchanges", "Exchanges with the coordinator, by outcome.", ["outcome"], registry=self.registry
        )
        self.exchange_failures = Counter(
            "leasehold_exchange_failures", "Calls to the coordinator that failed.", registry=self.registry
        )
        self.exchange_seconds = Histogram(
            "leasehold_exchange_seconds", "Round trip of an exchange.", registry=self.registry
        )
        self.stopped_lanes = Gauge(
            "leasehold_stopped_lanes", "Lanes that wait for people to look at them.", registry=self.registry
        )
        self.refusals = RefusalMetrics(self.registry)
        self.unreported_seconds = Gauge(
            "leasehold_unreported_seconds",
            "Age of the oldest usage that may not be booked yet.",
            registry=self.registry,
        )
        self.epochs = EpochMetrics(self.registry)
        self.cut_off = CutOffMetrics(self.registry)
        self._add_versions()
        self.blocked = Counter(
            "leasehold_blocked_checks", "Requests denied by a block, by its field.", ["field"], registry=self.registry
        )
        self.hot_keys = HotKeyMetrics(self.registry)
        self.store_calls = Gauge("leasehold_store_calls", "Commands sent to the store.", registry=self.registry)

    def _add_versions(self) -> None:
        self.policy_version = Gauge(
            "leasehold_policy_version", "Version of the policies in force.", registry=self.registry
        )
        self.block_version = Gauge(
            "leasehold_block_version", "Version of the block list in force.", registry=self.registry
        )
