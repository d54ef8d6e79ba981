"""What claims mean, and which settings of JWTs are refused."""

from typing import Any

import pytest
from pydantic_settings import SettingsConfigDict

from web.credentials.jwt_claims import find_claim, identity_of
from web.credentials.jwt_settings import JwtSettings, JwtTerms, is_trustworthy
from web.settings import SettingsError, load_settings

SCOPES = ("usage:read", "period:close", "admin")
NEEDED = {"SHOP_JWT_ISSUER": "https://login.example.com", "SHOP_JWT_AUDIENCE": "shop"}


class Shop(JwtSettings):
    model_config = SettingsConfigDict(env_prefix="SHOP_")

    @staticmethod
    def is_jwt_scope(scope: str) -> bool:
        return scope in SCOPES


def terms(**more: str) -> JwtTerms:
    found = load_settings(Shop, NEEDED | {f"SHOP_JWT_{name}": value for name, value in more.items()}).jwt_terms()
    assert found is not None
    return found


def scopes(claims: dict[str, Any], **more: str) -> set[str]:
    identity = identity_of({"sub": "ada", "exp": 1} | claims, terms(**more))
    assert identity is not None
    return set(identity.scopes)


def test_scopes_are_a_text_or_a_list_and_others_are_ignored() -> None:
    assert scopes({"scope": "openid usage:read period:close"}) == {"usage:read", "period:close"}
    assert scopes({"scope": ["admin", "root", 7, None, ["usage:read"]]}) == {"admin"}
    for nothing in (None, 7, {"admin": True}, True):
        assert scopes({"scope": nothing}) == set()


def test_dots_lead_into_objects_unless_the_whole_name_is_a_claim() -> None:
    nested = {"realm_access": {"roles": ["admin"]}}
    assert scopes(nested, SCOPE_CLAIM="realm_access.roles") == {"admin"}
    assert find_claim({"https://shop.example/scopes": "admin"}, "https://shop.example/scopes") == "admin"
    assert find_claim(nested, "realm_access.roles.0") is None
    assert find_claim(nested, "other.roles") is None


def test_with_a_prefix_only_values_with_it_are_scopes() -> None:
    assert scopes({"scope": "admin shop:usage:read shop:root"}, SCOPE_PREFIX="shop:") == {"usage:read"}


def test_with_a_map_only_its_values_grant_something() -> None:
    mapped = '{"finance": ["usage:read", "period:close"], "ops": []}'
    assert scopes({"groups": ["finance", "ops", "admin"]}, SCOPE_CLAIM="groups", SCOPE_MAP=mapped) == {
        "usage:read",
        "period:close",
    }


@pytest.mark.parametrize("subject", ["", "a\0b", "\ud800", "x" * 256, "line\nbreak", 7])
def test_a_subject_must_be_fit_to_name_somebody(subject: object) -> None:
    assert identity_of({"sub": subject, "exp": 1}, terms()) is None


@pytest.mark.parametrize("name", [None, 7, "\0", ["Ada"]])
def test_a_name_that_cannot_be_shown_is_left_out(name: object) -> None:
    identity = identity_of({"sub": "ada", "exp": 1, "email": name}, terms())
    assert identity is not None
    assert identity.name == ""


def test_the_name_comes_from_the_claim_that_the_settings_name() -> None:
    claims = {"sub": "ada", "exp": 10**400, "profile": {"name": "Ada " + "L" * 300}}
    identity = identity_of(claims, terms(NAME_CLAIM="profile.name"))
    assert identity is not None
    assert identity.name == "Ada " + "L" * 196
    assert identity.expires_at_s == 2**40


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"SHOP_JWT_AUDIENCE": ""}, "SHOP_JWT_ISSUER is set without SHOP_JWT_AUDIENCE"),
        ({"SHOP_JWT_ISSUER": ""}, "SHOP_JWT_AUDIENCE is set without SHOP_JWT_ISSUER"),
        ({"SHOP_JWT_ISSUER": "http://login.example.com"}, "SHOP_JWT_ISSUER must be an https:// address"),
        ({"SHOP_JWT_JWKS_URL": "ftp://login.example.com"}, "SHOP_JWT_JWKS_URL must be an https:// address"),
        ({"SHOP_JWT_ALGORITHMS": "RS256 HS256"}, "SHOP_JWT_ALGORITHMS cannot have 'HS256'"),
        ({"SHOP_JWT_ALGORITHMS": "none"}, "SHOP_JWT_ALGORITHMS cannot have 'none'"),
        ({"SHOP_JWT_ALGORITHMS": " "}, "SHOP_JWT_ALGORITHMS names no algorithm"),
        ({"SHOP_JWT_SCOPE_MAP": '{"a": ["root"]}'}, "SHOP_JWT_SCOPE_MAP has 'root', which is not a scope"),
        ({"SHOP_JWT_SCOPE_MAP": "finance=admin"}, "SHOP_JWT_SCOPE_MAP cannot be"),
        ({"SHOP_JWT_SCOPE_MAP": "{}", "SHOP_JWT_SCOPE_PREFIX": "x:"}, "are both set"),
        ({"SHOP_JWT_CLOCK_SKEW_MS": "-1"}, "SHOP_JWT_CLOCK_SKEW_MS cannot be"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(given: dict[str, str], reason: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings(Shop, NEEDED | given)
    assert reason in str(raised.value)


def test_without_an_issuer_no_jwt_is_accepted() -> None:
    assert load_settings(Shop, {}).jwt_terms() is None


def test_an_issuer_that_is_no_address_needs_the_address_of_its_keys() -> None:
    named = NEEDED | {"SHOP_JWT_ISSUER": "our-tokens"}
    with pytest.raises(SettingsError, match="SHOP_JWT_ISSUER must be"):
        load_settings(Shop, named)
    assert load_settings(Shop, named | {"SHOP_JWT_JWKS_URL": "https://login.example.com/keys"}).jwt_terms()


@pytest.mark.parametrize(
    ("url", "is_safe"),
    [
        ("https://login.example.com/x", True),
        ("http://127.0.0.1:8080/x", True),
        ("http://localhost", True),
        ("http://[::1]:80", True),
        ("http://10.0.0.1", False),
        ("https://", False),
        ("file:///etc/keys", False),
        ("https://[", False),
    ],
)
def test_keys_come_over_https_or_from_this_machine(url: str, is_safe: bool) -> None:
    assert is_trustworthy(url) == is_safe
