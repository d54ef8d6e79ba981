"""Every refusal is counted, and the log lines about them are bounded for floods and for many regions."""

from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from coordinator.refusals import LOG_EVERY_S, MOST_REMEMBERED, Refusals
from protocol.messages import ExchangeFault, ExchangeReply, ItemRefused
from protocol.outcomes import ExchangeOutcome, GrantRefusal

FAULT = ExchangeFault(field="frozen.leases[0].granted", rule="minimum", reason="Expected `int` >= 0")
REFUSED = ExchangeReply(outcome=ExchangeOutcome.REFUSED, lane=3, seq=7, fault=FAULT)


class Stand:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.registry = CollectorRegistry()
        counter = Counter("refused", "-", ["region", "kind", "reason"], registry=self.registry)
        self.refusals = Refusals(counter, lambda: self.now_s)

    def counted(self, region: str, kind: str, reason: str) -> float | None:
        labels = {"region": region, "kind": kind, "reason": reason}
        return self.registry.get_sample_value("refused_total", labels)


def test_a_refused_exchange_is_named_by_its_lane_field_and_rule() -> None:
    stand = Stand()
    with capture_logs() as logs:
        stand.refusals.note_replies("us-east", [REFUSED])
    assert stand.counted("us-east", "exchange", "minimum") == 1
    (line,) = logs
    expected = {
        "event": "item refused",
        "region": "us-east",
        "kind": "exchange",
        "rule": "minimum",
        "lane": 3,
        "seq": 7,
    }
    assert expected.items() <= line.items()


def test_a_flood_is_counted_and_logged_as_occasional_lines_with_their_number() -> None:
    stand = Stand()
    with capture_logs() as logs:
        for stand.now_s in (0.0, 1.0, 2.0, LOG_EVERY_S, LOG_EVERY_S + 1):
            stand.refusals.note_replies("us-east", [REFUSED])
    assert stand.counted("us-east", "exchange", "minimum") == 5
    assert [line["not_logged"] for line in logs] == [0, 2]


def test_wants_refused_by_their_quota_are_not_malformed_items() -> None:
    stand = Stand()
    bad = ItemRefused(quota="x", refusal=GrantRefusal.INVALID, rule="quota_key", reason="live.demands[0].quota: no key")
    exhausted = ItemRefused(quota="exports:tenant=acme", refusal=GrantRefusal.EXHAUSTED)
    reply = ExchangeReply(outcome=ExchangeOutcome.APPLIED, lane=0, seq=1, refused=[bad, exhausted])
    with capture_logs() as logs:
        stand.refusals.note_replies("us-east", [reply])
    assert stand.counted("us-east", "demand", "quota_key") == 1
    assert [(line["kind"], line["field"]) for line in logs] == [("demand", "live.demands[0].quota")]


def test_the_memory_of_the_refusal_log_is_bounded() -> None:
    stand = Stand()
    with capture_logs() as logs:
        for number in range(MOST_REMEMBERED + 10):
            stand.refusals.note_replies(f"region-{number}", [REFUSED])
    assert len(logs) == MOST_REMEMBERED
    assert stand.counted(f"region-{MOST_REMEMBERED + 5}", "exchange", "minimum") == 1
