"""The OpenAPI document: responses, headers and problems of each operation, for people and for generators of clients.

FastAPI describes what it reads: parameters and bodies that are pydantic's. Responses are msgspec's, which encodes them,
and are described here, in the arguments of a route: `@router.get(path, **described(answers={200: Region, 404: None}))`.
"""

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import msgspec.inspect
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response

from protocol.problems import MEDIA_TYPE, PROBLEMS
from web.problems import InvalidParameter

JSON = "application/json"
INT32_MAX = 2**31 - 1

_REF = "#/components/schemas/{name}"
_HEADER_REF = "#/components/headers/{name}"
_CARRIED = "x-leasehold-schemas"  # what an operation refers to, until install_openapi gathers it
_ANY_OPERATION = (400, 401, 403, 404, 405, 422, 431, 500)
BODY_REFUSALS = (413, 415)

HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The id of this request in logs and problem documents: the caller's own, or a new one.",
        "schema": {"type": "string"},
        "example": "0f3a9d1c5b7e4a2f8c6d0e1b2a394857",
    },
    "ETag": {
        "description": "Names this version. Send it as `If-None-Match` to read, as `If-Match` to replace.",
        "schema": {"type": "string"},
        "example": '"7"',
    },
    "Location": {
        "description": "The path of what was created.",
        "schema": {"type": "string", "format": "uri-reference"},
        "example": "/v1/exports/3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10",
    },
    "Retry-After": {
        "description": "Seconds after which to send the request again.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 86_400},
        "example": 1,
    },
    "Idempotency-Replayed": {
        "description": "`true` if this is the stored response to an earlier request with the same `Idempotency-Key`.",
        "schema": {"type": "string", "enum": ["true"]},
        "example": "true",
    },
    "WWW-Authenticate": {
        "description": "The scheme in which to send a token.",
        "schema": {"type": "string"},
        "example": "Bearer",
    },
    "Allow": {
        "description": "The methods of this path.",
        "schema": {"type": "string"},
        "example": "GET, HEAD",
    },
    "Leasehold-Unmatched": {
        "description": "No enforced policy matches the request, and the limits document warns about it or denies it.",
        "schema": {"type": "string", "enum": ["warn", "deny"]},
        "example": "warn",
    },
    "RateLimit-Policy": {
        "description": "The whole limit (`q`) of each policy that matched, and its window (`w`) in seconds.",
        "schema": {"type": "string"},
        "example": '"search";q=300;w=60',
    },
    "RateLimit": {
        "description": "What remains (`r`) of each policy that matched, and the seconds until there is more (`t`).",
        "schema": {"type": "string"},
        "example": '"search";r=99;t=1',
    },
    "X-RateLimit-Limit": {
        "description": "The whole limit of the tightest policy. Left out, like the other two, if no policy matched.",
        "schema": {"type": "integer", "minimum": 0},
        "example": 300,
    },
    "X-RateLimit-Remaining": {
        "description": "What remains of the tightest policy.",
        "schema": {"type": "integer", "minimum": 0},
        "example": 99,
    },
    "X-RateLimit-Reset": {
        "description": "Seconds until the tightest policy is whole again.",
        "schema": {"type": "integer", "minimum": 0},
        "example": 1,
    },
    "Content-Range": {
        "description": "The part of the file that this response is, and the size of the file.",
        "schema": {"type": "string"},
        "example": "bytes 1048576-4194303/4194304",
    },
}
RATE_LIMIT_HEADERS = tuple(name for name in HEADERS if "RateLimit" in name)
_HEADERS_OF_STATUS = {
    304: ("ETag",),
    401: ("WWW-Authenticate",),
    405: ("Allow",),
    429: ("Retry-After",),
    503: ("Retry-After",),
}

_PROBLEM_SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "description": "A refusal, as RFC 9457 describes it.",
    "type": "object",
    "required": ["type", "title", "status", "instance", "request_id"],
    "properties": {
        "type": {
            "type": "string",
            "format": "uri-reference",
            "description": "The kind of problem. It is stable, and a path of this server that explains the kind. New "
            "kinds may be added.",
            "examples": [f"/problems/{slug}" for slug in sorted(PROBLEMS)],
        },
        "title": {"type": "string", "description": "The kind in a few words.", "examples": ["Invalid request"]},
        "status": {"type": "integer", "minimum": 400, "maximum": 599, "examples": [422]},
        "detail": {"type": "string", "description": "What happened, and what to do."},
        "instance": {"type": "string", "description": "The path of the request, decoded."},
        "request_id": {"type": "string", "description": "The id under which the logs have this request."},
        "invalid_parameters": {
            "type": "array",
            "description": "Each fault of the request, where there are any.",
            "items": {
                "title": "InvalidParameter",
                "type": "object",
                "required": list(InvalidParameter._fields),
                "properties": {name: {"type": "string"} for name in InvalidParameter._fields},
            },
        },
    },
}
_PROBLEM_REF = {"$ref": _REF.format(name="Problem")}


# --- one operation ----------------------------------------------------------------------------------------------------


def described(
    *,
    body: Any = None,
    example: Any = None,
    answers: Mapping[int, Any],
    headers: Mapping[int, Collection[str]] | None = None,
    also: Collection[str] = (),
    plain: Collection[int] = (),
) -> dict[str, Any]:
    """Return the arguments of a FastAPI route whose responses are encoded by msgspec.

    `answers` are statuses and the types of their bodies. None stands for no body; for a refusal it stands for a plain
    problem document, and a type for a problem document that has its fields as well. The refusals that any operation may
    answer with are added, and so are the headers that follow from a status; `headers` are further ones. `also` are
    further media types of a response with status 200. `plain` are refusals whose body is no problem document. `body` is
    the type of a request's body that msgspec decodes, and `example` is one.
    """
    carried: dict[str, Any] = {}
    statuses = dict.fromkeys((*_ANY_OPERATION, *(BODY_REFUSALS if body is not None else ()))) | dict(answers)
    responses = {
        status: _response(status, statuses[status], carried, is_problem=status >= 400 and status not in plain)
        for status in sorted(statuses)
    }
    for media_type in also:
        responses[200].setdefault("content", {})[media_type] = {"schema": {"type": "string"}}
    for status, names in (headers or {}).items():
        describe_headers(responses[status], names)
    if 304 in responses:
        describe_headers(responses[200], ["ETag"])
    extra: dict[str, Any] = {_CARRIED: carried}
    if body is not None:
        content = {"schema": _schema(body, carried)} | (
            {} if example is None else {"example": msgspec.to_builtins(example)}
        )
        extra["requestBody"] = {"required": True, "content": {JSON: content}}
    return {
        "responses": responses,
        "openapi_extra": extra,
        "status_code": min(answers),
        "response_class": Response,  # has no media type of its own, so that only what is said here is described
        "response_model": None,
    }


def describe_headers(response: MutableMapping[str, Any], names: Collection[str]) -> None:
    """Add headers to the description of a response."""
    response.setdefault("headers", {}).update({name: {"$ref": _HEADER_REF.format(name=name)} for name in names})


def describe_refusals(responses: MutableMapping[int | str, dict[str, Any]], statuses: Collection[int]) -> None:
    """Add plain problem documents to the responses of an operation."""
    for status in statuses:
        responses.setdefault(status, _response(status, None, {}, is_problem=True))


def _response(status: int, type_: Any, carried: dict[str, Any], *, is_problem: bool) -> dict[str, Any]:
    response: dict[str, Any] = {"description": _meaning(status)}
    describe_headers(response, ("X-Request-Id", *_HEADERS_OF_STATUS.get(status, ())))
    if is_problem:
        response["content"] = {MEDIA_TYPE: {"schema": _problem_schema(type_, carried)}}
    elif type_ is not None:
        response["content"] = {JSON: {"schema": _schema(type_, carried)}}
    return response


def _meaning(status: int) -> str:
    """Return the phrase of a status. Python's own differ between versions where RFC 9110 has renamed some."""
    return {413: "Content Too Large", 422: "Unprocessable Content"}.get(status) or HTTPStatus(status).phrase


def _problem_schema(type_: Any, carried: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a problem document. With more fields it has a name, which generators give to a type."""
    if type_ is None:
        return _PROBLEM_REF
    name = f"{type_.__name__}Problem"
    _merge(carried, {name: {"title": name, "allOf": [_PROBLEM_REF, _schema(type_, carried)]}})
    return {"$ref": _REF.format(name=name)}


def _schema(type_: Any, carried: dict[str, Any]) -> dict[str, Any]:
    (schema,), components = msgspec.json.schema_components([type_], ref_template=_REF)
    for struct in _structs_of(msgspec.inspect.type_info(type_), set()):
        _name_times(struct, components)
    _merge(carried, components)
    return schema


def _structs_of(found: Any, seen: set[type]) -> Iterator[msgspec.inspect.StructType]:
    """Return all structs that a type is made of."""
    if isinstance(found, msgspec.inspect.StructType):
        if found.cls in seen:
            return
        seen.add(found.cls)
        yield found
        found = [field.type for field in found.fields]
    if isinstance(found, Sequence):
        for each in found:
            yield from _structs_of(each, seen)
    elif isinstance(found, msgspec.inspect.Type):
        parts = (getattr(found, name, ()) for name in ("types", "item_types", "item_type", "key_type", "value_type"))
        yield from _structs_of([part for part in parts if part], seen)


def _name_times(struct: msgspec.inspect.StructType, components: Mapping[str, Any]) -> None:
    """Say of each time that it is one: msgspec says so only where a time without a zone would be refused."""
    for field in struct.fields:
        types = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        if any(isinstance(each, msgspec.inspect.DateTimeType) for each in types):
            schema = components[struct.cls.__name__]["properties"][field.encode_name]
            for each in schema.get("anyOf", [schema]):
                if each.get("type") == "string":
                    each["format"] = "date-time"


def _merge(into: dict[str, Any], components: Mapping[str, Any]) -> None:
    for name, schema in components.items():
        if not _is_same(into.setdefault(name, schema), schema):
            raise ValueError(f"two different types are called {name}: their schemas cannot be told apart")


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Compare two schemas. pydantic and msgspec describe an enumeration in different ways."""
    return one == other or ("enum" in one and set(one["enum"]) == set(other.get("enum", ())))


# --- the document -----------------------------------------------------------------------------------------------------


def operation_id(route: APIRoute) -> str:
    """Name an operation after its function: generators of clients make a method of it."""
    return route.name


def install_openapi(app: FastAPI, *, server: Mapping[str, str] | None = None, token_is_optional: bool = False) -> None:
    """Complete the document that `app.openapi()` returns, in an order that does not change.

    `server` is where the service listens unless it is configured otherwise. What is under /v1/ takes a bearer token;
    `token_is_optional` says that requests without one are served as well.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        _merge(schemas, {"Problem": _PROBLEM_SCHEMA})
        for path, operation in _operations(document):
            _merge(schemas, operation.pop(_CARRIED, {}))
            operation["summary"] = operation["operationId"].replace("_", " ").capitalize()
            if path.startswith("/v1/"):
                operation["security"] = [{}, {"token": []}] if token_is_optional else [{"token": []}]
        if server is not None:
            document["servers"] = [dict(server)]
        components["headers"] = HEADERS
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        components["schemas"] = dict(sorted(schemas.items()))
        _spell_out(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, operations in document.get("paths", {}).items():
        yield from ((path, operation) for operation in operations.values() if isinstance(operation, dict))


def _spell_out(value: object) -> None:
    """Add what generators of clients need: the type of each enumeration and array item, and the size of integers."""
    if isinstance(value, dict):
        if isinstance(value.get("enum"), list) and all(isinstance(each, str) for each in value["enum"]):
            value["type"] = "string"
        if value.get("type") == "array" and not value.keys() & {"items", "prefixItems"}:
            value["items"] = {}
        if value.get("type") == "integer" and value.get("maximum", INT32_MAX + 1) > INT32_MAX:
            value["format"] = "int64"
        for each in value.values():
            _spell_out(each)
    elif isinstance(value, list):
        for each in value:
            _spell_out(each)
