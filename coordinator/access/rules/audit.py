"""Actions of people that the audit records, and who did them."""

from enum import StrEnum
from typing import NamedTuple


class Action(StrEnum):
    TOKEN_ISSUED = "token.issued"  # noqa: S105 - the name of an action
    TOKEN_REVOKED = "token.revoked"  # noqa: S105
    IDENTITY_SEEN = "identity.seen"  # the first JWT of somebody, or the first with another name
    LIMITS_APPLIED = "limits.applied"
    SUBSCRIPTION_PUT = "subscription.put"
    SUBSCRIPTION_DELETED = "subscription.deleted"
    TENANT_PUT = "tenant.put"
    TENANT_DELETED = "tenant.deleted"
    OVERRIDE_ADDED = "override.added"
    OVERRIDE_DELETED = "override.deleted"
    BLOCK_PUT = "block.put"
    BLOCK_DELETED = "block.deleted"
    RESET_ADDED = "reset.added"
    REGION_PUT = "region.put"
    REGION_IDENTITIES_PUT = "region.identities_put"
    EPOCH_REBOUND = "epoch.rebound"
    EPOCH_KEPT = "epoch.kept"
    EPOCH_RETIRED = "epoch.retired"
    RESOLUTION_PROPOSED = "resolution.proposed"
    RESOLUTION_APPROVED = "resolution.approved"
    ADJUSTMENT_PROPOSED = "adjustment.proposed"
    ADJUSTMENT_APPROVED = "adjustment.approved"
    ADJUSTMENT_WITHDRAWN = "adjustment.withdrawn"
    INSTALLATION_CONFIRMED = "installation.confirmed"
    WEBHOOK_ADDED = "webhook.added"
    WEBHOOK_ROTATED = "webhook.rotated"
    WEBHOOK_PAUSED = "webhook.paused"
    WEBHOOK_REPLAYED = "webhook.replayed"
    WEBHOOK_DELETED = "webhook.deleted"
    REBALANCE_BEGUN = "rebalance.begun"
    REBALANCE_CANCELLED = "rebalance.cancelled"
    REBALANCE_ENDED = "rebalance.ended"
    REBALANCE_HOLD_ENDED = "rebalance.hold_ended"
    PERIOD_CLOSING = "period.closing"
    PERIOD_CLOSED = "period.closed"
    PERIOD_ARCHIVED = "period.archived"


class Actor(NamedTuple):
    """The actor of an HTTP request: the ids of its token and of the request."""

    name: str
    request_id: str | None = None
