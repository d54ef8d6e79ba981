"""The OpenAPI document of described routes is complete and deterministic."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from fastapi import FastAPI
from msgspec import Struct, defstruct

from tests.unit.web.conftest import make_app
from web.bodies import reply
from web.openapi import described, install_openapi


def _document() -> dict[str, Any]:
    return make_app().openapi()


def _references(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(_references(inner) for inner in value.values()))
    return set().union(*(_references(inner) for inner in value)) if isinstance(value, list) else set()


def test_every_reference_leads_somewhere() -> None:
    document = _document()
    names = {reference.rpartition("/")[2] for reference in _references(document["paths"]["/orders"])}
    headers = {"Allow", "Retry-After", "WWW-Authenticate", "X-Request-Id"}
    assert names == {"Order", "Placed", "PlacedProblem", "Problem"} | headers
    assert {reference.rpartition("/")[2] for reference in _references(document)} <= document["components"][
        "schemas"
    ].keys() | document["components"]["headers"].keys()


def test_bodies_and_refusals_are_described() -> None:
    place = _document()["paths"]["/orders"]["post"]
    assert place["requestBody"]["required"] is True
    assert place["requestBody"]["content"].keys() == {"application/json"}
    assert set(place["responses"]) == {
        *("201", "400", "401", "403", "404", "405", "413", "415", "422", "429", "431", "500")
    }
    assert place["responses"]["201"]["content"].keys() == {"application/json"}
    assert all(
        answer["content"].keys() == {"application/problem+json"}
        for status, answer in place["responses"].items()
        if status >= "400"
    )
    assert "x-leasehold-schemas" not in json.dumps(place)


def test_a_route_without_a_body_does_not_refuse_one() -> None:
    listed = _document()["paths"]["/orders"]["get"]
    assert not {"413", "415"} & listed["responses"].keys()
    assert [parameter["name"] for parameter in listed["parameters"]] == ["page_size"]


def test_an_empty_answer_has_no_content() -> None:
    app = FastAPI()
    app.delete("/", **described(answers={204: None}))(lambda: reply(None, 204))
    assert "content" not in app.openapi()["paths"]["/"]["delete"]["responses"]["204"]
    assert "200" not in app.openapi()["paths"]["/"]["delete"]["responses"]


def test_a_second_document_is_the_same() -> None:
    app = make_app()
    assert json.dumps(app.openapi()) == json.dumps(app.openapi())


def test_every_process_makes_the_same_document() -> None:
    program = "import json; from tests.unit.web.conftest import make_app; print(json.dumps(make_app().openapi()))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {(json.dumps(_document()) + "\n").encode()}


def test_two_types_of_one_name_are_refused() -> None:
    one: type[Struct] = defstruct("Same", [("a", int)])
    other: type[Struct] = defstruct("Same", [("b", str)])
    app = FastAPI()
    app.get("/one", **described(answers={200: one}))(lambda: reply(None))
    app.get("/other", **described(answers={200: other}))(lambda: reply(None))
    install_openapi(app)
    with pytest.raises(ValueError, match="Same"):
        app.openapi()
