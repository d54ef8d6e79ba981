"""Every refusal is a problem document (RFC 9457), and every kind of refusal is in one table.

Programs branch on `type`, people read `title` and `detail`, and whoever answers a call for help searches the logs for
`request_id`. The `type` is a path of this very server, where the kind is explained. What nobody foresaw becomes
`internal-error`: it says nothing about the inside, while the log has the traceback under the same request id.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from doors.request_ids import request_id_of

MEDIA_TYPE = "application/problem+json"

_log = structlog.get_logger("doors.problems")


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
    "nonce-of-another-life": ProblemKind(
        409,
        "Nonce of another life",
        "This nonce opened an epoch for another life of the store. Write a fresh nonce into the store.",
    ),
    "rebind-refused": ProblemKind(
        409,
        "Epoch does not go on",
        "The member `refusal` says why the epoch is not bound to another life of its store: a new one is opened.",
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

_KIND_OF_STATUS = {
    400: "bad-request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    408: "request-timeout",
    412: "precondition-failed",
    413: "body-too-large",
    415: "unsupported-media-type",
    422: "invalid-request",
    431: "headers-too-large",
    500: "internal-error",
    503: "not-ready",
}

# pydantic's words for what bodies call by the shorter name
_RULES = {"missing": "required", "extra_forbidden": "unknown"}


class InvalidParameter(NamedTuple):
    field: str
    rule: str
    reason: str


class Problem(Exception):
    """A refusal. `kind` is a slug of PROBLEMS; `extra` are further members of the document."""

    def __init__(
        self,
        kind: str,
        detail: str,
        *,
        invalid_parameters: Sequence[InvalidParameter] = (),
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.status, self.title, _ = PROBLEMS[kind]
        self.invalid_parameters = tuple(invalid_parameters)
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})


def problem_document(problem: Problem, instance: str, request_id: str) -> dict[str, object]:
    """The members of RFC 9457 win over `extra`: nobody can send a document that contradicts its status."""
    document = {
        **problem.extra,
        **_members(f"/problems/{problem.kind}", problem.title, problem.status),
        "detail": problem.detail,
        "instance": instance,
        "request_id": request_id,
    }
    if problem.invalid_parameters:
        document["invalid_parameters"] = [each._asdict() for each in problem.invalid_parameters]
    return document


def _members(type_: str, title: str, status: int) -> dict[str, object]:
    return {"type": type_, "title": title, "status": status}


def problem_response(problem: Problem, request: Request) -> Response:
    document = problem_document(problem, request.url.path, request_id_of(request.scope))
    headers = {"WWW-Authenticate": "Bearer"} if problem.status == HTTPStatus.UNAUTHORIZED else {}
    return _response(document, problem.status, {**headers, **problem.headers})


def _response(document: dict[str, object], status: int, headers: Mapping[str, str]) -> Response:
    return Response(msgspec.json.encode(document), status, headers, media_type=MEDIA_TYPE)


# --- whatever was raised ---------------------------------------------------------------------------------------------


def answer_to(error: Exception, request: Request) -> Response:
    """The reply to anything that was raised while a request was served."""
    if isinstance(error, HTTPException) and isinstance(error.__cause__, Problem):
        error = error.__cause__  # FastAPI wraps what is raised while it reads a body
    if isinstance(error, Problem):
        return problem_response(error, request)
    if isinstance(error, RequestValidationError):
        return problem_response(_of_validation(error), request)
    if isinstance(error, HTTPException):
        return _of_http(error, request)
    return _of_unforeseen(error, request)


def _of_validation(error: RequestValidationError) -> Problem:
    if any(each["type"] == "json_invalid" for each in error.errors()):
        return Problem("invalid-json", PROBLEMS["invalid-json"].explanation)
    invalid = [_invalid_parameter(each) for each in error.errors()]
    return Problem("invalid-request", f"{invalid[0].field}: {invalid[0].reason}", invalid_parameters=invalid)


def _invalid_parameter(error: Mapping[str, Any]) -> InvalidParameter:
    place = ".".join(str(part) for part in error["loc"][1:]) or str(error["loc"][0])
    return InvalidParameter(place, _RULES.get(error["type"], error["type"]), error["msg"])


def _of_http(error: HTTPException, request: Request) -> Response:
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = _methods_of_path(request)
    kind = _KIND_OF_STATUS.get(error.status_code)
    if kind is None:
        return _of_unlisted_status(error, request, headers)
    return problem_response(Problem(kind, _detail(error, kind), headers=headers), request)


def _detail(error: HTTPException, kind: str) -> str:
    """What the raiser had to say, unless it is only the status in words, or comes from the inside."""
    said = isinstance(error.detail, str) and error.detail != HTTPStatus(error.status_code).phrase
    return error.detail if said and error.status_code < 500 else PROBLEMS[kind].explanation


def _of_unlisted_status(error: HTTPException, request: Request, headers: Mapping[str, str]) -> Response:
    """RFC 9457 has a type for what means no more than its status."""
    members = _members("about:blank", HTTPStatus(error.status_code).phrase, error.status_code)
    document = {**members, "instance": request.url.path, "request_id": request_id_of(request.scope)}
    return _response(document, error.status_code, headers)


def _methods_of_path(request: Request) -> str:
    """Starlette names the methods of the first route only, though several may share the path."""
    path = request.scope["path"]
    allowed: set[str] = set()
    for route in iter_route_contexts(request.app.routes):
        regex = getattr(route, "path_regex", None)
        if regex is not None and regex.match(path):
            allowed |= route.methods or set()
    if "GET" in allowed:
        allowed.add("HEAD")
    return ", ".join(sorted(allowed))


def _of_unforeseen(error: Exception, request: Request) -> Response:
    _log.error(
        "unforeseen error",
        request_id=request_id_of(request.scope),
        method=request.method,
        path=request.url.path,
        exc_info=error,
    )
    return problem_response(Problem("internal-error", PROBLEMS["internal-error"].explanation), request)


# --- the app ---------------------------------------------------------------------------------------------------------


def install_problems(app: FastAPI) -> None:
    """From here on, everything that is raised is answered with a problem document."""
    for error in (Problem, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, _answer)
    app.add_api_route("/problems/{slug}", _explain, methods=["GET"], include_in_schema=False)
    # An unknown path is unknown; a redirect would send people where a Host header says.
    app.router.redirect_slashes = False


async def _answer(request: Request, error: Exception) -> Response:
    return answer_to(error, request)


async def _explain(slug: str) -> Response:
    kind = PROBLEMS.get(slug)
    if kind is None:
        raise Problem("not-found", PROBLEMS["not-found"].explanation)
    return PlainTextResponse(f"{kind.title}\n\nStatus {kind.status}\n\n{kind.explanation}\n")
