"""The OpenAPI documents in the repository equal those that the code makes, and have every operation of the contract."""

import json
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest

import coordinator.openapi
import regional_agent.openapi
from protocol.check import Check, CheckBatch, Hold
from protocol.problems import PROBLEMS

DOORS = {
    coordinator.openapi: {
        "GET /healthz",
        "GET /metrics",
        "GET /readyz",
        "POST /v1/regions/{region}/epochs",
        "POST /v1/regions/{region}/epochs/{epoch}:rebind",
        "POST /v1/regions/{region}/exchanges",
        "POST /v1/regions/{region}/decisions",
        "POST /v1/regions/{region}/shares",
        "GET /v1/regions/{region}/signals",
        "GET /v1/policies",
        "GET /v1/limits",
        "PUT /v1/limits",
        "POST /v1/limits:replay",
        "POST /v1/limits/{version}:replay",
        "GET /v1/subscriptions",
        "GET /v1/subscriptions/{tenant}",
        "PUT /v1/subscriptions/{tenant}",
        "DELETE /v1/subscriptions/{tenant}",
        "GET /v1/overrides",
        "POST /v1/overrides",
        "GET /v1/overrides/{override}",
        "DELETE /v1/overrides/{override}",
        "GET /v1/blocks",
        "POST /v1/blocks",
        "GET /v1/resets",
        "POST /v1/resets",
        "DELETE /v1/blocks/{field}/{value}",
        "GET /v1/regions",
        "POST /v1/regions",
        "GET /v1/regions/{region}",
        "PUT /v1/regions/{region}",
        "PUT /v1/regions/{region}/identities",
        "GET /v1/allocations",
        "GET /v1/rates",
        "GET /v1/slots",
        "GET /v1/rebalances",
        "POST /v1/rebalances",
        "GET /v1/rebalances/{rebalance}",
        "POST /v1/rebalances/{rebalance}:cancel",
        "GET /v1/audit",
        "GET /v1/decisions",
        "GET /v1/seals",
        "POST /v1/verifications",
        "GET /v1/verifications/{verification_id}",
        "GET /v1/usage",
        "GET /v1/periods",
        "GET /v1/periods/{period}",
        "GET /v1/periods/{period}/reconciliation",
        "GET /v1/periods/{period}/trial-balance",
        "POST /v1/periods/{period}:close",
        "GET /v1/periods/{period}/statement",
        "GET /v1/periods/{period}/statements",
        "GET /v1/usage/changes",
        "GET /v1/seals/latest",
        "GET /v1/tenants",
        "GET /v1/tenants/{tenant}/statements/{month}",
        "GET /v1/tenants/{tenant}",
        "PUT /v1/tenants/{tenant}",
        "DELETE /v1/tenants/{tenant}",
        "GET /v1/statements/{statement}",
        "GET /v1/statements/{statement}/lines/{n}/proof",
        "POST /v1/archives",
        "GET /v1/archives",
        "GET /v1/archives/{period}",
        "POST /v1/exports",
        "GET /v1/exports/{export}",
        "POST /v1/exports/{export}:cancel",
        "GET /v1/exports/{export}/data",
        "GET /v1/statements/{statement}/lines/{n}/reports",
        "POST /v1/epochs/{epoch}:retire",
        "GET /v1/suspense",
        "GET /v1/installation",
        "GET /v1/diagnosis",
        "GET /v1/lanes",
        "POST /v1/installation:confirm",
        "GET /v1/webhooks",
        "POST /v1/webhooks",
        "GET /v1/webhooks/{webhook}",
        "DELETE /v1/webhooks/{webhook}",
        "GET /v1/webhooks/{webhook}/deliveries",
        *(f"POST /v1/webhooks/{{webhook}}:{deed}" for deed in ("rotate", "pause", "resume", "replay")),
        "GET /v1/adjustments",
        "POST /v1/adjustments",
        "GET /v1/adjustments/{adjustment}",
        "POST /v1/adjustments/{adjustment}:approve",
        "POST /v1/adjustments/{adjustment}:withdraw",
        "POST /v1/suspense:propose",
        "POST /v1/suspense/{resolution}:approve",
        "POST /v1/suspense/bulk",
        "GET /v1/suspense/bulk/{bulk}",
        "POST /v1/suspense/bulk/{bulk}:approve",
        "GET /v1/quarantine",
    },
    regional_agent.openapi: {
        "GET /healthz",
        "GET /metrics",
        "GET /readyz",
        "POST /v1/check",
        "POST /v1/check:batch",
        "POST /v1/explain",
        "POST /v1/holds",
        "GET /v1/holds/{hold_id}",
        "POST /v1/holds/{hold_id}:commit",
        "POST /v1/holds/{hold_id}:extend",
        "POST /v1/holds/{hold_id}:release",
        "GET /v1/status",
    },
}

SERVERS = {coordinator.openapi: "http://127.0.0.1:8400", regional_agent.openapi: "http://127.0.0.1:8411"}
each_service = pytest.mark.parametrize("service", DOORS, ids=lambda service: service.__name__.partition(".")[0])


def operations(service: ModuleType) -> dict[str, dict[str, Any]]:
    paths = json.loads(service.document())["paths"]
    return {f"{method.upper()} {path}": each for path, methods in paths.items() for method, each in methods.items()}


@each_service
def test_the_document_equals_the_one_of_the_code(service: ModuleType) -> None:
    assert service.PATH.read_text(encoding="utf-8") == service.document(), "run `./dev openapi`, and look at the change"


@each_service
def test_every_operation_of_the_contract_is_there(service: ModuleType) -> None:
    assert set(operations(service)) == DOORS[service]


@each_service
def test_every_refusal_is_a_problem_document(service: ModuleType) -> None:
    for name, operation in operations(service).items():
        if " /v1/" not in name:
            continue
        refusals = {status: answer for status, answer in operation["responses"].items() if int(status) >= 400}
        assert {"401", "403", "422"} <= refusals.keys(), name
        assert all(list(answer["content"]) == ["application/problem+json"] for answer in refusals.values()), name


@each_service
def test_every_reference_leads_somewhere(service: ModuleType) -> None:
    text = service.document()
    schemas = json.loads(text)["components"]["schemas"]
    parts = text.split('"#/components/schemas/')[1:]
    assert {part.partition('"')[0] for part in parts} <= schemas.keys()


@each_service
def test_every_operation_is_fit_for_a_generated_client(service: ModuleType) -> None:
    """Check the names, texts and examples that people and generators of clients read."""
    found = operations(service)
    ids = [each["operationId"] for each in found.values()]
    assert len(set(ids)) == len(ids)
    for name, operation in found.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", operation["operationId"]), name
        assert re.fullmatch(r"[A-Z][a-z ]*[a-z]", operation["summary"]), name
        assert operation["description"].endswith("."), name
        for each in operation.get("parameters", ()):
            assert each["description"].endswith("."), (name, each["name"])
            assert "examples" in each or "example" in each or "examples" in each["schema"], (name, each["name"])
        for status, answer in operation["responses"].items():
            if " /v1/" in name:
                assert "X-Request-Id" in answer["headers"], (name, status)


@each_service
def test_types_are_as_wide_and_as_named_as_generated_clients_need(service: ModuleType) -> None:
    document = json.loads(service.document())
    assert [server["url"] for server in document["servers"]] == [SERVERS[service]]
    for path, value in _nested(document, "#"):
        if value.get("type") == "integer" and value.get("maximum", 2**31) >= 2**31:
            assert value.get("format") == "int64", path
        if isinstance(value.get("enum"), list):
            assert value.get("type") in ("string", "integer"), f"{path}: generators make `any` of it"
    for name, operation in operations(service).items():
        for status, answer in operation["responses"].items():
            for content in answer.get("content", {}).values():
                assert "allOf" not in content.get("schema", {}), f"{name} {status}: a type without a name"


def _nested(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        yield path, value
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _nested(each, f"{path}/{key}")


def test_checks_and_holds_show_their_headers_and_an_example_that_is_valid() -> None:
    found = operations(regional_agent.openapi)
    bodies = {"POST /v1/check": Check, "POST /v1/check:batch": CheckBatch, "POST /v1/holds": Hold}
    for name, body in bodies.items():
        msgspec.convert(found[name]["requestBody"]["content"]["application/json"]["example"], body)
    for name, admitted in (("POST /v1/check", "200"), ("POST /v1/holds", "201")):
        for status in (admitted, "429", "503"):
            headers = found[name]["responses"][status]["headers"].keys()
            assert {"RateLimit", "RateLimit-Policy", "X-RateLimit-Limit"} <= headers, (name, status)
            assert ("Retry-After" in headers) is (status != admitted)


def test_every_kind_of_problem_is_named() -> None:
    problem = json.loads(regional_agent.openapi.document())["components"]["schemas"]["Problem"]
    assert problem["properties"]["type"]["examples"] == sorted(f"/problems/{slug}" for slug in PROBLEMS)


@each_service
def test_readiness_describes_its_refusal(service: ModuleType) -> None:
    refusal = operations(service)["GET /readyz"]["responses"]["503"]
    assert refusal["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Health"}
    assert "Retry-After" in refusal["headers"]
