"""The kinds of problem documents (RFC 9457) that coordinator, agents and middleware answer with, in one table.

Programs branch on the slug, which is the end of the document's `type`.
"""

from typing import NamedTuple

MEDIA_TYPE = "application/problem+json"


class ProblemKind(NamedTuple):
    status: int
    title: str
    explanation: str


PROBLEMS: dict[str, ProblemKind] = {
    "bad-request": ProblemKind(400, "Bad request", "The request is not well-formed HTTP."),
    "invalid-json": ProblemKind(400, "Not JSON", "The body is not JSON (RFC 8259) in UTF-8, or nested too deeply."),
    "unauthenticated": ProblemKind(
        401,
        "Token needed",
        "Send a token that is valid: `Authorization: Bearer lh_…`. A region may show a client certificate instead.",
    ),
    "issuer-unavailable": ProblemKind(
        503,
        "Issuer unavailable",
        "The JWT cannot be verified now, because the keys of its issuer cannot be fetched. Retry later.",
    ),
    "forbidden": ProblemKind(
        403, "Not permitted", "The token is valid, but does not permit this request. `detail` says what it lacks."
    ),
    "foreign-origin": ProblemKind(
        403,
        "Foreign origin",
        "The request comes from a web page of another origin. An agent without a service token answers local programs.",
    ),
    "misdirected": ProblemKind(
        421,
        "Wrong host",
        "The header Host does not name this agent. Call it by a loopback address or name, or give it a service token.",
    ),
    "not-found": ProblemKind(404, "Not found", "This path does not exist."),
    "hold-unknown": ProblemKind(
        404, "Hold not known", "The hold was not made in this region, or it ended too long ago."
    ),
    "method-not-allowed": ProblemKind(405, "Method not allowed", "The header Allow names the methods of this path."),
    "request-timeout": ProblemKind(408, "Request timeout", "The request did not arrive in time. Send it again."),
    "idempotency-key-in-flight": ProblemKind(
        409, "Request in progress", "The first request with this Idempotency-Key has no response yet. Retry later."
    ),
    "nonce-of-another-incarnation": ProblemKind(
        409,
        "Nonce of another incarnation",
        "The nonce opened an epoch for another incarnation of the store. Write a new nonce into the store.",
    ),
    "rebind-refused": ProblemKind(
        409,
        "Epoch cannot be rebound",
        "`refusal` says why the epoch cannot continue in another incarnation of its store. A new epoch is opened.",
    ),
    "period-not-closable": ProblemKind(
        409, "Period cannot be closed yet", "`missing` lists what has to be resolved first. Nothing was changed."
    ),
    "export-not-ready": ProblemKind(
        409, "Export not ready", "The export is still being made, or nothing is sealed yet. Retry later."
    ),
    "export-gone": ProblemKind(410, "Export gone", "The export was cancelled or has expired. Request a new one."),
    "period-not-archivable": ProblemKind(
        409, "Period cannot be archived", "`missing` lists what has to be resolved first. Nothing was changed."
    ),
    "archived": ProblemKind(
        410,
        "Archived",
        "The lines of `period` are in an archive that this coordinator cannot read. `location` says where it is.",
    ),
    "hold-not-extended": ProblemKind(
        409,
        "Hold cannot be extended now",
        "The region uses more slots than its current share. Nothing was changed; retry later.",
    ),
    "hold-ended": ProblemKind(
        409,
        "Hold already ended",
        "`state` says how the hold ended, and `committed` with how many units. Nothing was changed.",
    ),
    "release-unsupported": ProblemKind(
        409,
        "Release not supported",
        "The agent is of a release that is too old for this coordinator. Nothing was changed; upgrade the agent.",
    ),
    "region-down": ProblemKind(409, "Region is down", "A region with the status `down` cannot open an epoch."),
    "two-stores": ProblemKind(
        409,
        "Two stores under one name",
        "Two stores open epochs for this region in turn. Stop the one that does not belong to it.",
    ),
    "resolution-refused": ProblemKind(
        409, "Resolution refused", "The suspense or quarantine cannot be resolved this way. `refusal` names the reason."
    ),
    "adjustment-refused": ProblemKind(409, "Adjustment refused", "`refusal` names the reason. Nothing was changed."),
    "rebalance-running": ProblemKind(
        409, "Another rebalance is running", "`rebalance` is its id. Wait until it ends, or cancel it."
    ),
    "rebalance-impossible": ProblemKind(
        409, "Rebalance impossible", "`cannot` names the units that cannot be moved, and why. Nothing was changed."
    ),
    "identity-taken": ProblemKind(
        409, "Identity of another region", "Another region has this identity. Remove it there first."
    ),
    "full": ProblemKind(409, "Maximum reached", "The maximum number has been reached. Delete some first."),
    "precondition-failed": ProblemKind(
        412, "Changed meanwhile", "If-Match does not name the current version. Read it, merge, and retry."
    ),
    "body-too-large": ProblemKind(413, "Body too large", "The body is larger than this server accepts."),
    "unsupported-media-type": ProblemKind(
        415, "Unsupported media type", "Send JSON: `Content-Type: application/json`."
    ),
    "invalid-request": ProblemKind(
        422, "Invalid request", "The request breaks a rule. `invalid_parameters` names each parameter and its rule."
    ),
    "operation-conflict": ProblemKind(
        422, "Operation id reused", "This `operation_id` was used before with another body. Use a new one."
    ),
    "idempotency-key-reused": ProblemKind(
        422, "Idempotency-Key reused", "This Idempotency-Key was used before with another body. Use a new one."
    ),
    "range-not-satisfiable": ProblemKind(416, "Range not satisfiable", "The range begins after the last byte."),
    "hold-needed": ProblemKind(
        422,
        "Hold needed",
        "A concurrency quota limits this request. Take a slot with `POST /v1/holds`, and release it afterwards.",
    ),
    "quota-exceeded": ProblemKind(
        429, "Quota exceeded", "A quota of this subject is spent. `retry_after_ms` says when to retry."
    ),
    "over-budget": ProblemKind(
        429,
        "Region over budget",
        "The region has used up a budget of this minute. `budget` names it, and Retry-After says when to retry.",
    ),
    "cost-above-limit": ProblemKind(
        429,
        "Cost above the limit",
        "The request can never pass: its cost is above the limit, or above the burst of the rate.",
    ),
    "no-lease": ProblemKind(
        429,
        "No units in this region now",
        "The region has no lease with enough units, and has requested units from the coordinator. Retry.",
    ),
    "cut-off": ProblemKind(
        429,
        "Cut off from the coordinator",
        "The region cannot reach the coordinator, and its lease is spent or expired. The limit may not be used up.",
    ),
    "region-drained": ProblemKind(
        429,
        "Region drained",
        "An operator has drained this region, and it admits nothing. Send the request to another region.",
    ),
    "blocked": ProblemKind(
        429, "Blocked", "The subject is on the block list. `blocked_by` names the field that is blocked."
    ),
    "unmatched": ProblemKind(
        429,
        "No policy matches",
        "No policy matches the request, and the limits document has `unmatched: deny`. Add a policy, or send another"
        " route.",
    ),
    "headers-too-large": ProblemKind(
        431, "Headers too large", "Request line and headers together are larger than this server accepts."
    ),
    "internal-error": ProblemKind(
        500, "Internal error", "An unexpected error occurred. The log has its details under the request id."
    ),
    "store-unavailable": ProblemKind(
        503, "Store unavailable", "The region's store does not answer, and the policy fails closed."
    ),
    "coordinator-unavailable": ProblemKind(
        503,
        "Coordinator unavailable",
        "Each request of this quota needs the coordinator, which does not answer, and the policy fails closed.",
    ),
    "not-ready": ProblemKind(503, "Not ready", "The process cannot serve requests yet, or cannot serve them now."),
    "limits-not-readable": ProblemKind(
        503,
        "Limits of a newer release",
        "A newer release applied the limits document, and this coordinator cannot read it. Nothing was changed.",
    ),
    "clock-not-trusted": ProblemKind(
        503,
        "Clock not trusted",
        "The coordinator's clock differs from the database's. Use another coordinator, or correct the clock.",
    ),
    "database-unavailable": ProblemKind(503, "Database unavailable", "Postgres does not answer. Retry."),
}
