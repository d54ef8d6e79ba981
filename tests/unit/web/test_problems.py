"""Every exception becomes a problem document."""

import httpx
import pytest
from structlog.testing import capture_logs

from protocol.problems import PROBLEMS
from tests.unit.web.conftest import SECRET, assert_problem

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("kind", sorted(PROBLEMS))
async def test_every_kind_is_answered_and_explained(client: httpx.AsyncClient, kind: str) -> None:
    document = assert_problem(await client.get(f"/refused/{kind}"), PROBLEMS[kind].status, kind)
    assert document["detail"] == "Because."
    assert document["invalid_parameters"] == [{"field": "a.b", "rule": "known", "reason": "no"}]
    page = await client.get(document["type"])
    assert page.status_code == 200
    assert PROBLEMS[kind].title in page.text
    assert str(PROBLEMS[kind].status) in page.text


async def test_headers_of_a_problem_are_sent(client: httpx.AsyncClient) -> None:
    assert (await client.get("/refused/store-unavailable")).headers["retry-after"] == "3"


async def test_a_missing_token_is_answered_with_the_scheme(client: httpx.AsyncClient) -> None:
    assert (await client.get("/refused/unauthenticated")).headers["www-authenticate"] == "Bearer"


async def test_an_unknown_path_is_not_found(client: httpx.AsyncClient) -> None:
    assert_problem(await client.get("/nothing"), 404, "not-found")
    assert_problem(await client.get("/problems/nothing"), 404, "not-found")


async def test_an_extra_slash_is_not_redirected(client: httpx.AsyncClient) -> None:
    assert_problem(await client.get("/orders/"), 404, "not-found")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "MADEUP"])
async def test_an_unsupported_method_is_refused(client: httpx.AsyncClient, method: str) -> None:
    answer = await client.request(method, "/orders")
    assert_problem(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == "GET, HEAD, POST"


async def test_head_is_get_without_a_body(client: httpx.AsyncClient) -> None:
    got, head = await client.get("/orders"), await client.head("/orders")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    missing = await client.head("/nothing")
    assert (missing.status_code, missing.content) == (404, b"")


async def test_head_of_a_path_without_get_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.head("/by-fastapi")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("status", [500, 503])
async def test_http_errors_do_not_reveal_internals(client: httpx.AsyncClient, status: int) -> None:
    answer = await client.get(f"/http/{status}")
    assert answer.status_code == status
    assert SECRET not in answer.text


async def test_a_status_of_its_own_is_a_blank_problem(client: httpx.AsyncClient) -> None:
    answer = await client.get("/http/418")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "about:blank"
    assert answer.json()["status"] == 418


async def test_an_unexpected_error_is_logged_and_not_revealed(client: httpx.AsyncClient) -> None:
    with capture_logs() as logs:
        answer = await client.get("/breaks?token=" + SECRET)
    document = assert_problem(answer, 500, "internal-error")
    assert "hunter2" not in answer.text
    assert "RuntimeError" not in answer.text
    (logged,) = [entry for entry in logs if entry["event"] == "unexpected error"]
    assert logged["request_id"] == document["request_id"]
    assert isinstance(logged["exc_info"], RuntimeError)
    assert SECRET not in logged["path"]


@pytest.mark.parametrize(
    ("query", "field"), [("page_size=0", "page_size"), ("page_size=x", "page_size"), ("page_size=", "page_size")]
)
async def test_a_bad_query_names_the_parameter(client: httpx.AsyncClient, query: str, field: str) -> None:
    document = assert_problem(await client.get(f"/orders?{query}"), 422, "invalid-request")
    assert [each["field"] for each in document["invalid_parameters"]] == [field]


async def test_bodies_that_fastapi_parses_are_refused_alike(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    assert_problem(await client.post("/by-fastapi", content=b"{", headers=headers), 400, "invalid-json")
    document = assert_problem(await client.post("/by-fastapi", json={"a": "b"}), 422, "invalid-request")
    assert document["invalid_parameters"][0]["field"] == "a"
    assert_problem(await client.post("/by-fastapi"), 422, "invalid-request")
