"""Routes that read requests with FastAPI and pydantic, and read them strictly.

Left to itself FastAPI ignores unknown query parameters, takes the last of two values, and reads JSON with a parser that
accepts a doubled name. A route of the class StrictRoute refuses all three, and reports them together with every other
fault of the request:

    @router.get("/v1/things")
    async def list_things(query: Annotated[ThingQuery, Query()]) -> Response: ...

    class ThingQuery(QueryModel): ...
"""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError
from starlette.datastructures import QueryParams

from web.bodies import decode, refuse_other_media
from web.openapi import BODY_REFUSALS, describe_refusals
from web.problems import InvalidParameter, Problem

Handler = Callable[[Request], Awaitable[Response]]


class BodyModel(BaseModel):
    """A JSON body. No value is converted from another type, and unknown fields are refused.

    JSON has no identifiers, enumerations and times. A field of such a type says `strict=False`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class QueryModel(BaseModel):
    """The query parameters of an operation. Unknown ones are refused, and so are two values for one that is no list."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_repeated(cls, value: object) -> object:
        if isinstance(value, _Repeated):
            raise PydanticCustomError("once", "The parameter is given more than once.")
        return value


class _Repeated(str):
    """The last of several values of a query parameter that was read as one value."""


class _StrictQueryParams(QueryParams):
    def get(self, key: Any, default: Any = None) -> Any:
        values = self.getlist(key)
        return _Repeated(values[-1]) if len(values) > 1 else super().get(key, default)


class StrictRequest(Request):
    """A request whose JSON and query parameters are not ambiguous."""

    @property
    def query_params(self) -> QueryParams:
        if not hasattr(self, "_query_params"):
            self._query_params = _StrictQueryParams(self.scope["query_string"])
        return self._query_params

    async def json(self) -> Any:
        return decode(await self.body(), Any)


class StrictRoute(APIRoute):
    """A route whose requests are strict, and whose refusals of bodies are in the OpenAPI document."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.body_field is not None:
            describe_refusals(self.responses, BODY_REFUSALS)

    def get_route_handler(self) -> Handler:  # type: ignore[override]  # FastAPI awaits the result, and no more
        read: Handler = super().get_route_handler()
        has_body, has_query = self.body_field is not None, bool(self.dependant.query_params)
        tag = str(self.body_field.field_info.discriminator or "") if self.body_field is not None else ""

        async def handle(request: Request) -> Response:
            try:
                return await read(request)
            except RequestValidationError as error:
                raise (_untagged(error, tag) if tag else error) from None

        async def strictly(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            await self.before(strict)
            if has_body and await strict.body():
                refuse_other_media(strict)
            if not has_query and strict.query_params:
                _refuse_all(strict.query_params)
            return await self.around(strict, handle)

        return strictly

    async def before(self, request: Request) -> None:
        """Run before anything of the request is looked at. A subclass authenticates here."""

    async def around(self, request: Request, handle: Handler) -> Response:
        """Handle a request. A subclass may add to it."""
        return await handle(request)


def _untagged(error: RequestValidationError, tag: str) -> RequestValidationError:
    """Place each fault in the body itself: of a tagged union pydantic puts the tag's value in front of the field."""
    faults = [{**each, "loc": (each["loc"][0], *(each["loc"][2:] or [tag]))} for each in error.errors()]
    return RequestValidationError(faults, body=error.body)


def _refuse_all(parameters: QueryParams) -> None:
    faults = [InvalidParameter(name, "unknown", "This operation has no query parameters.") for name in parameters]
    raise Problem("invalid-request", f"{faults[0].field}: {faults[0].reason}", invalid_parameters=sorted(faults))
