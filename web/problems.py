"""Answer every refusal with a problem document (RFC 9457), whose kinds are in one table.
Programs branch on `type`, people read `title` and `detail`, and operators search the logs for `request_id`. The `type`
is a path of this server, which explains the kind. An unexpected exception becomes `internal-error`: the document says
nothing about internals, and the log has the traceback under the request id.
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

from protocol.problems import MEDIA_TYPE, PROBLEMS
from web.request_ids import request_id_of

_log = structlog.get_logger("web.problems")


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

# The rules of pydantic by how their names end, in the words of JSON Schema that msgspec's faults have as well.
_RULES = (
    ("extra_forbidden", "unknown"),
    ("too_short", "min_length"),
    ("too_long", "max_length"),
    ("pattern_mismatch", "pattern"),
    ("greater_than_equal", "minimum"),
    ("greater_than", "minimum"),
    ("less_than_equal", "maximum"),
    ("less_than", "maximum"),
    ("union_tag_invalid", "enum"),
    ("union_tag_not_found", "required"),
    ("literal_error", "enum"),
    ("enum", "enum"),
    ("missing", "required"),
    ("value_error", "format"),
    ("_parsing", "format"),
    ("_type", "type"),
)
_REASONS = {"extra_forbidden": "There is no such field or parameter.", "missing": "It is required."}


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


def refused(field: str, rule: str, reason: str) -> Problem:
    """Return the problem of a request with one fault."""
    return refused_all([InvalidParameter(field, rule, reason)])


def refused_all(faults: Sequence[InvalidParameter]) -> Problem:
    """Return the problem of a request with these faults."""
    return Problem("invalid-request", f"{faults[0].field}: {faults[0].reason}", invalid_parameters=faults)


def problem_document(problem: Problem, instance: str, request_id: str) -> dict[str, object]:
    """Return the document of a problem. The members of RFC 9457 win over `extra`, so the two cannot contradict."""
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
    """Return the response to any exception that was raised while a request was served."""
    if isinstance(error, HTTPException) and isinstance(error.__cause__, Problem):
        error = error.__cause__  # FastAPI wraps exceptions that reading a body raises
    if isinstance(error, Problem):
        return problem_response(error, request)
    if isinstance(error, RequestValidationError):
        return problem_response(_of_validation(error), request)
    if isinstance(error, HTTPException):
        return _of_http(error, request)
    return _of_unexpected(error, request)


def _of_validation(error: RequestValidationError) -> Problem:
    if any(each["type"] == "json_invalid" for each in error.errors()):
        return Problem("invalid-json", PROBLEMS["invalid-json"].explanation)
    return refused_all(sorted({_invalid_parameter(each) for each in error.errors()}))


def _invalid_parameter(error: Mapping[str, Any]) -> InvalidParameter:
    where, *path = error["loc"]
    if where == "query":
        path = path[:1]  # of a repeated parameter all values have one name
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or where
    rule = next((rule for ending, rule in _RULES if error["type"].endswith(ending)), error["type"])
    return InvalidParameter(field[:256], rule, _REASONS.get(error["type"]) or _reason(error["msg"]))


def _reason(message: str) -> str:
    return message.removeprefix("Value error, ")[:256]


def _of_http(error: HTTPException, request: Request) -> Response:
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = _methods_of_path(request)
    kind = _KIND_OF_STATUS.get(error.status_code)
    if kind is None:
        return _of_unlisted_status(error, request, headers)
    return problem_response(Problem(kind, _detail(error, kind), headers=headers), request)


def _detail(error: HTTPException, kind: str) -> str:
    """Return the detail of an exception, unless it only repeats the status, or may show internals."""
    said = isinstance(error.detail, str) and error.detail != HTTPStatus(error.status_code).phrase
    return error.detail if said and error.status_code < 500 else PROBLEMS[kind].explanation


def _of_unlisted_status(error: HTTPException, request: Request, headers: Mapping[str, str]) -> Response:
    """Answer with `about:blank`, the type of RFC 9457 for a problem that means no more than its status."""
    members = _members("about:blank", HTTPStatus(error.status_code).phrase, error.status_code)
    document = {**members, "instance": request.url.path, "request_id": request_id_of(request.scope)}
    return _response(document, error.status_code, headers)


def _methods_of_path(request: Request) -> str:
    """Return the methods of all routes of a path. Starlette's own header has only those of the first one."""
    path = request.scope["path"]
    allowed: set[str] = set()
    for route in iter_route_contexts(request.app.routes):
        regex = getattr(route, "path_regex", None)
        if regex is not None and regex.match(path):
            allowed |= route.methods or set()
    if "GET" in allowed:
        allowed.add("HEAD")
    return ", ".join(sorted(allowed))


def _of_unexpected(error: Exception, request: Request) -> Response:
    _log.error(
        "unexpected error",
        request_id=request_id_of(request.scope),
        method=request.method,
        path=request.url.path,
        exc_info=error,
    )
    return problem_response(Problem("internal-error", PROBLEMS["internal-error"].explanation), request)


# --- the app ---------------------------------------------------------------------------------------------------------


def install_problems(app: FastAPI) -> None:
    """Have an app answer every exception with a problem document."""
    for error in (Problem, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, _answer)
    app.add_api_route("/problems/{slug}", _explain, methods=["GET"], include_in_schema=False)
    # An unknown path is not found. A redirect would lead to any host that the Host header names.
    app.router.redirect_slashes = False


async def _answer(request: Request, error: Exception) -> Response:
    return answer_to(error, request)


async def _explain(slug: str) -> Response:
    kind = PROBLEMS.get(slug)
    if kind is None:
        raise Problem("not-found", PROBLEMS["not-found"].explanation)
    return PlainTextResponse(f"{kind.title}\n\nStatus {kind.status}\n\n{kind.explanation}\n")
