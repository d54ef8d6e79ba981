"""What `help()` and an IDE show of each public name: a sentence, and a signature with names."""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import leasehold
from leasehold.client._async.limiter import AsyncOpenHold

MODULES = {
    "leasehold.middleware.asgi": ["LimitMiddleware", "by_route_and_address"],
    "leasehold.middleware.django": ["DjangoLimitMiddleware", "by_route_and_address"],
    "leasehold.middleware.flask": ["install_limits", "by_route_and_address"],
    "leasehold.middleware.wsgi": ["WsgiLimitMiddleware", "by_route_and_address"],
    "leasehold.testing": ["FakeClient", "AsyncFakeClient", "FakeAgent", "FakeHold"],
}


def public_objects() -> Iterator[tuple[str, Any]]:
    yield from ((name, getattr(leasehold, name)) for name in leasehold.__all__ if name != "Subject")
    yield "AsyncOpenHold", AsyncOpenHold
    for module, names in MODULES.items():
        yield from ((f"{module}.{name}", getattr(importlib.import_module(module), name)) for name in names)


def documented(name: str, found: Any) -> Iterator[tuple[str, Any]]:
    """Yield the object itself and its public methods."""
    yield name, found
    if inspect.isclass(found):
        for member in dir(found):
            value = getattr(found, member)
            if not member.startswith("_") and callable(value) and not hasattr(BaseException, member):
                yield f"{name}.{member}", value


@pytest.mark.parametrize(("name", "found"), [pair for each in public_objects() for pair in documented(*each)])
def test_each_public_name_has_a_sentence_and_a_signature(name: str, found: Any) -> None:
    assert "." in (inspect.getdoc(found) or ""), name
    kinds = {parameter.kind for parameter in inspect.signature(found).parameters.values()}
    assert inspect.Parameter.VAR_POSITIONAL not in kinds, f"{name} hides its parameters"


def test_each_exported_name_is_listed_for_completion() -> None:
    assert set(leasehold.__all__) <= set(dir(leasehold))
