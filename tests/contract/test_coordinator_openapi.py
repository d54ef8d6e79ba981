"""The OpenAPI document that is checked in is the one that the code makes."""

import json
from typing import Any

import pytest

from coordinator.openapi import PATH, document

HOW = "run `python -m coordinator.openapi` and look at what changed"


def test_the_document_is_the_codes() -> None:
    assert PATH.read_text(encoding="utf-8") == document(), HOW


@pytest.fixture(scope="module")
def operations() -> dict[str, dict[str, Any]]:
    paths = json.loads(document())["paths"]
    return {
        f"{method.upper()} {path}": operation
        for path, methods in paths.items()
        for method, operation in methods.items()
    }


def test_every_door_of_the_contract_is_there(operations: dict[str, dict[str, Any]]) -> None:
    assert set(operations) == {
        "GET /healthz",
        "GET /metrics",
        "GET /readyz",
        "POST /v1/regions/{region}/epochs",
        "POST /v1/regions/{region}/exchanges",
        "GET /v1/regions/{region}/signals",
        "GET /v1/policies",
        "GET /v1/limits",
        "PUT /v1/limits",
        "GET /v1/subscriptions",
        "GET /v1/subscriptions/{tenant}",
        "PUT /v1/subscriptions/{tenant}",
        "DELETE /v1/subscriptions/{tenant}",
        "GET /v1/regions",
        "POST /v1/regions",
        "GET /v1/regions/{region}",
        "PUT /v1/regions/{region}",
        "GET /v1/usage",
        "GET /v1/periods",
        "GET /v1/periods/{period}",
        "GET /v1/periods/{period}/reconciliation",
    }


def test_every_refusal_is_a_problem_document(operations: dict[str, dict[str, Any]]) -> None:
    for name, operation in operations.items():
        if " /v1/" not in name:
            continue
        refusals = {status: answer for status, answer in operation["responses"].items() if int(status) >= 400}
        assert {"401", "403", "422"} <= refusals.keys(), name
        assert all(list(answer["content"]) == ["application/problem+json"] for answer in refusals.values()), name


def test_every_reference_leads_somewhere() -> None:
    text = document()
    schemas = json.loads(text)["components"]["schemas"]
    parts = text.split('"#/components/schemas/')[1:]
    assert {part.partition('"')[0] for part in parts} <= schemas.keys()
