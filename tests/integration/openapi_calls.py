"""Calls of any shape that an OpenAPI document allows, and some that it does not, made by schemathesis."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.budget import size

EXAMPLES = size("LEASEHOLD_FUZZ_EXAMPLES", 4, short=1)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def operations_of(document: str) -> list[Any]:
    schema = schemathesis.openapi.from_dict(msgspec.json.decode(document))
    found: list[Any] = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    return [each for each in found if each.path.startswith("/v1/")]


def call_in_any_shape(
    operation: Any,
    url: str,
    session: requests.Session,
    *,
    headers: Mapping[str, str],
    examples: int = EXAMPLES,
    check: Callable[[requests.Response], None] = lambda _: None,
) -> None:
    """Make calls, and hold each answer against the document and against `check`."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in GenerationMode]))
    def once(case: Any) -> None:
        answer = case.call(base_url=url, session=session, headers=dict(headers), timeout=30)
        check(answer)
        case.validate_response(answer, checks=CHECKS)

    once()
