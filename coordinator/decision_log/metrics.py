"""The metrics of the decision log in a coordinator."""

from web.declared_metrics import DeclaredMetrics, counter


class StoredDecisionMetrics(DeclaredMetrics):
    stored = counter("leasehold_coordinator_decision_log_rows", "Rows of the decision log that were taken.", "region")
    refused = counter(
        "leasehold_coordinator_decision_log_rows_refused",
        "Rows of the decision log that were refused: malformed, or of a time that is not kept.",
        "region",
    )
