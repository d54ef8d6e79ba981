"""The metrics of the decision log in a coordinator."""

from prometheus_client import CollectorRegistry

from web.declared_metrics import DeclaredMetrics, counter, gauge


class StoredDecisionMetrics(DeclaredMetrics):
    stored = counter("leasehold_coordinator_decision_log_rows", "Rows of the decision log that were taken.", "region")
    refused = counter(
        "leasehold_coordinator_decision_log_rows_refused",
        "Rows of the decision log that were refused: malformed, or of a time that is not kept.",
        "region",
    )


class PublishedDecisionMetrics(DeclaredMetrics):
    sent = counter("leasehold_coordinator_decision_log_kafka_messages", "Decisions that Kafka has taken.")
    lost = counter(
        "leasehold_coordinator_decision_log_kafka_lost",
        "Decisions that did not reach Kafka. full: too many waited; timeout: Kafka did not take them in time; refused: "
        "Kafka or its client refused them; fatal: the producer failed and was opened again; closing: the coordinator "
        "stopped before Kafka took them.",
        "reason",
    )
    reopened = counter(
        "leasehold_coordinator_decision_log_kafka_producer_reopened",
        "How often the Kafka producer failed for good and was opened again.",
    )
    waiting = gauge("leasehold_coordinator_decision_log_kafka_waiting", "Decisions that wait for Kafka.")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        for reason in (
            "full",
            "timeout",
            "refused",
            "fatal",
            "closing",
        ):  # a series that appears with 1 has no increase
            self.lost.labels(reason)
        self.sent_messages = 0

    def count_sent(self) -> None:
        self.sent_messages += 1
        self.sent.inc()
