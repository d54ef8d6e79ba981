"""Check which scopes exist and what each implies."""

import pytest

from coordinator.access.rules.scopes import SCOPES, allows, is_scope, region_of


@pytest.mark.parametrize("scope", [*SCOPES, "region:eu-west"])
def test_scopes_that_can_be_issued(scope: str) -> None:
    assert is_scope(scope)


@pytest.mark.parametrize(
    "text", ["", "root", "region:", "region:*", "region:EU", "region:eu\n", "quota:read ", "quota"]
)
def test_scopes_that_cannot(text: str) -> None:
    assert not is_scope(text)


def test_admin_implies_all_scopes_of_people_and_no_region() -> None:
    assert all(allows({"admin"}, scope) for scope in SCOPES)
    assert not allows({"admin"}, "region:eu-west")
    assert not allows({"region:eu"}, "region:eu-west")
    assert not allows({"quota:read"}, "quota:write")


def test_a_token_authenticates_a_region_only_if_it_names_exactly_one() -> None:
    assert region_of({"region:eu-west", "quota:read"}) == "eu-west"
    assert region_of({"region:eu-west", "region:us-east"}) is None
    assert region_of({"admin"}) is None
