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
    "unauthenticated": ProblemKind(401, "Token needed", "Send a token that is valid: `Authorization: Bearer lh_…`."),
    "forbidden": ProblemKind(403, "Not permitted", "The token is valid, but lacks the right that this takes."),
    "foreign-origin": ProblemKind(
        403,
        "Foreign origin",
        "The request comes from a web page of another origin. An agent without a service token answers local programs.",
    ),
    "misdirected": ProblemKind(
        421,
        "Another host's request",
        "The header Host does not name this agent. Call it by a loopback address or name, or give it a service token.",
    ),
    "not-found": ProblemKind(404, "Not found", "There is nothing at this path."),
    "hold-unknown": ProblemKind(
        404, "Hold not known", "No such hold was made in this region, or it ended so long ago that it is forgotten."
    ),
    "method-not-allowed": ProblemKind(405, "Method not allowed", "The header Allow names the methods of this path."),
    "request-timeout": ProblemKind(408, "Request timeout", "The request did not arrive in time. Send it again."),
    "idempotency-key-in-flight": ProblemKind(
        409, "Still being worked on", "The first request with this Idempotency-Key has no answer yet. Ask again."
    ),
    "nonce-of-another-incarnation": ProblemKind(
        409,
        "Nonce of another incarnation",
        "This nonce opened an epoch for another incarnation of the store. Write a fresh nonce into the store.",
    ),
    "rebind-refused": ProblemKind(
        409,
        "Epoch does not go on",
        "The member `refusal` says why the epoch cannot go on in another incarnation. A new epoch is opened.",
    ),
    "period-not-closable": ProblemKind(
        409, "Period not closable", "People have something to do first: `missing` lists it. Nothing was changed."
    ),
    "export-not-ready": ProblemKind(
        409, "Export not ready", "It is still being made, or nothing is sealed yet. Ask again."
    ),
    "export-gone": ProblemKind(
        410, "Export gone", "It was cancelled, or its bytes were kept for as long as they are. Ask for another one."
    ),
    "hold-not-extended": ProblemKind(
        409,
        "The hold cannot be extended now",
        "More slots are in use than the region may have by now. Nothing was changed; ask again.",
    ),
    "hold-ended": ProblemKind(
        409, "Hold ended otherwise", "`state` says how, and `committed` how many units were. Nothing was changed."
    ),
    "region-down": ProblemKind(409, "Region is down", "A region whose status is `down` opens no epoch."),
    "two-stores": ProblemKind(
        409,
        "Two stores under one name",
        "Two stores replace each other as the region's again and again. Stop the one that does not belong there.",
    ),
    "resolution-refused": ProblemKind(
        409, "Resolution refused", "Suspense or quarantine does not end this way; `refusal` names the reason."
    ),
    "adjustment-refused": ProblemKind(409, "Adjustment refused", "`refusal` names the reason. Nothing was changed."),
    "rebalance-running": ProblemKind(
        409, "Another rebalance is running", "`rebalance` is its id. Wait for its end, or cancel it."
    ),
    "rebalance-impossible": ProblemKind(
        409, "Nothing of it can be moved", "`cannot` says of which units, and why. Nothing was changed."
    ),
    "full": ProblemKind(409, "No more can be added", "There are as many of these as there can be. Delete some first."),
    "precondition-failed": ProblemKind(
        412, "Changed meanwhile", "If-Match names another version than the current one. Read, merge, try again."
    ),
    "body-too-large": ProblemKind(413, "Body too large", "The body is larger than this server accepts."),
    "unsupported-media-type": ProblemKind(
        415, "Unsupported media type", "Send JSON: `Content-Type: application/json`."
    ),
    "invalid-request": ProblemKind(
        422, "Invalid request", "The request was understood, but breaks a rule; `invalid_parameters` names each."
    ),
    "operation-conflict": ProblemKind(
        422, "Operation id used twice", "This operation_id was used before, with another body."
    ),
    "idempotency-key-reused": ProblemKind(
        422, "Idempotency-Key used twice", "This Idempotency-Key was used before, with another body."
    ),
    "range-not-satisfiable": ProblemKind(416, "Range not satisfiable", "There is nothing from that byte on."),
    "hold-needed": ProblemKind(
        422,
        "Hold needed",
        "What is limited is how much runs at once: take a slot with POST /v1/holds, and give it back.",
    ),
    "quota-exceeded": ProblemKind(
        429, "Quota exceeded", "A quota of this subject is spent. `retry_after_ms` says when to ask again."
    ),
    "over-budget": ProblemKind(
        429,
        "Region over budget",
        "The region has used up a budget of this minute; `budget` names it. Retry-After says when to ask again.",
    ),
    "cost-above-limit": ProblemKind(
        429, "Cost above the limit", "This cost can never pass: it is above the limit, or above the burst of the rate."
    ),
    "no-lease": ProblemKind(
        429,
        "No units in this region now",
        "The region has no lease with enough units, and has asked the coordinator for some. Ask again.",
    ),
    "cut-off": ProblemKind(
        429,
        "Cut off from the coordinator",
        "The region cannot ask for more units, and its lease is spent or expired. The limit may not be used up.",
    ),
    "region-drained": ProblemKind(
        429, "Region drained", "People have drained this region: it admits nothing. Send the request to another one."
    ),
    "blocked": ProblemKind(
        429, "Blocked", "The subject is on the block list; `blocked_by` says by which of its fields. No quota matters."
    ),
    "headers-too-large": ProblemKind(
        431, "Headers too large", "Request line and headers together are larger than this server accepts."
    ),
    "internal-error": ProblemKind(
        500, "Internal error", "Something went wrong here. The log has it under the request id."
    ),
    "store-unavailable": ProblemKind(
        503, "Store unavailable", "The region's store does not answer, and the policy fails closed."
    ),
    "coordinator-unavailable": ProblemKind(
        503,
        "Coordinator unavailable",
        "Each request of this quota asks the coordinator, which does not answer, and the policy fails closed.",
    ),
    "not-ready": ProblemKind(503, "Not ready", "This process cannot do its work yet, or cannot do it now."),
    "clock-not-trusted": ProblemKind(
        503,
        "Clock not trusted",
        "This coordinator's clock differs from the database's. Ask another, or correct the clock.",
    ),
    "database-unavailable": ProblemKind(503, "Database unavailable", "Postgres does not answer. Ask again."),
}
