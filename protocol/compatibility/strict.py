"""Types for what people write: the same as those for our own services, but an unknown field is refused."""

import functools
import operator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Struct


def strict(type_: Any) -> Any:
    """Return the type of the same values without unknown fields, at every depth.

    In what people write, a misspelt field would silently keep its default. Its values are subclasses of the original's.
    """
    if isinstance(type_, type) and issubclass(type_, Struct):
        return _strict_struct(type_)
    origin, parts = get_origin(type_), get_args(type_)
    if origin is None or origin is Literal:
        return type_
    if origin is Annotated:
        return Annotated[(strict(parts[0]), *parts[1:])]
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, map(strict, parts))
    return origin[tuple(map(strict, parts))]


@functools.cache
def _strict_struct(type_: type[Struct]) -> type[Struct]:
    config = type_.__struct_config__
    return msgspec.defstruct(
        type_.__name__,
        [
            (field.name, strict(field.type), _default_of(field))
            for field in msgspec.structs.fields(type_)
            if strict(field.type) is not field.type
        ],
        bases=(type_,),
        tag=config.tag,
        tag_field=config.tag_field,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.field() if field.default is msgspec.NODEFAULT else msgspec.field(default=field.default)
