"""Give a new stack limits and subscriptions to try, through the coordinator's API.

Each part is set only if there is none, so that later changes by users stay.
"""

from typing import Any

from leasehold.local_stack.calls import call, detail_of
from leasehold.local_stack.data_directory import CannotStart
from leasehold.local_stack.plan import REGIONS

LIMITS: dict[str, Any] = {
    "plans": {"free": {}, "pro": {}, "enterprise": {}},
    "quotas": [
        {"name": "exports", "kind": "allowance", "limit": 1000, "period": "month", "report_within": "1s"},
        {"name": "api", "kind": "rate", "limit": "100/second, burst 200", "algorithm": "token_bucket"},
        {"name": "reports", "kind": "concurrency", "limit": 5, "slot_ttl": "10m"},
        {"name": "requests", "kind": "rate", "limit": "300/minute, burst 60"},
        {"name": "tokens", "kind": "allowance", "limit": 1_000_000, "period": "month"},
        {"name": "logins", "kind": "rate", "limit": "15/hour", "algorithm": "sliding_log"},
    ],
    "policies": [
        {
            "name": "search",
            "match": {"route": "/v1/search*", "method": ["GET", "POST"]},
            "by": ["tenant"],
            "quota": "api",
            "on_store_failure": "open",
        },
        {
            "name": "export",
            "match": {"route": "/v1/exports", "method": "POST"},
            "by": ["tenant"],
            "quota": "exports",
            "on_store_failure": "closed",
            "wait": "2s",
        },
        {
            "name": "report",
            "match": {"route": "/v1/reports", "method": "POST"},
            "by": ["tenant"],
            "quota": "reports",
        },
        {
            "name": "chat",
            "match": {"route": "/v1/chat", "method": "POST"},
            "by": ["tenant"],
            "quota": "requests",
        },
        {
            "name": "chat-tokens",
            "match": {"route": "/v1/chat", "method": "POST"},
            "by": ["tenant"],
            "quota": "tokens",
            "wait": "2s",
        },
        {
            "name": "login",
            "match": {"route": "/v1/login", "method": "POST"},
            "by": ["user"],
            "quota": "logins",
        },
    ],
}
SUBSCRIPTIONS = {"acme": "pro", "globex": "free", "initech": "enterprise"}


def seed(coordinator: str, token: str) -> None:
    """Create missing regions, limits and subscriptions, or raise CannotStart."""
    for region in REGIONS:
        _call("PUT", f"{coordinator}/v1/regions/{region}", token, {})
    if _call("GET", f"{coordinator}/v1/limits", token)["version"] == 0:
        _call("PUT", f"{coordinator}/v1/limits", token, LIMITS)
    if not _call("GET", f"{coordinator}/v1/subscriptions", token)["data"]:
        for tenant, plan in SUBSCRIPTIONS.items():
            _call("PUT", f"{coordinator}/v1/subscriptions/{tenant}", token, {"plan": plan})


def _call(method: str, url: str, token: str, body: object = None) -> Any:
    answer = call(method, url, token=token, body=body)
    if answer.status >= 300:
        raise CannotStart(f"the coordinator answered {answer.status} to {method} {url}: {detail_of(answer)}")
    return answer.body
