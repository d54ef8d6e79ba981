"""JWTs are verified with the keys of a real issuer, which rotates them and goes away."""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import jwt
import pytest
import structlog
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.budget import examples
from tests.certificates import Authority
from tests.conftest import free_port
from tests.issuer import AUDIENCE, Issuer, public_jwk, rsa_key
from web.credentials.issuer_keys import UNKNOWN_KEY_EVERY_S, IssuerKeys, KeysUnavailable, signing_keys
from web.credentials.jwt_metrics import JwtMetrics
from web.credentials.jwt_settings import ASYMMETRIC, JwtTerms
from web.credentials.verify_jwt import JwtVerifier
from web.problems import Problem

pytestmark = pytest.mark.anyio


def terms(issuer: Issuer, **changed: Any) -> JwtTerms:
    usual: dict[str, Any] = {
        "issuer": issuer.url,
        "audience": AUDIENCE,
        "keys_url": "",
        "algorithms": frozenset(("RS256", "ES256", "EdDSA")),
        "clock_skew_s": 5.0,
        "keys_max_age_s": 3600.0,
        "scope_claim": "scope",
        "scope_prefix": "",
        "scope_map": None,
        "name_claim": "email",
        "is_scope": lambda scope: scope == "usage:read",
    }
    return JwtTerms(**(usual | changed))


class Verifying:
    """A verifier with its metrics."""

    def __init__(self, issuer: Issuer, now_s: Callable[[], float] | None = None, **changed: Any) -> None:
        self.registry = CollectorRegistry()
        self.verifier = JwtVerifier(terms(issuer, **changed), self.registry, *((now_s,) if now_s else ()))

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"leasehold_jwt_{name}_total", labels) or 0

    async def reason(self, token: str) -> str:
        """Return why a JWT is refused, as the metric says. The answer does not say it."""
        before = dict(self._refused())
        with pytest.raises(Problem) as raised:
            await self.verifier.verify(token)
        [reason] = [name for name, count in self._refused() if count != before.get(name, 0)]
        assert reason not in str(raised.value.detail)
        if reason == "keys_unavailable":
            assert raised.value.kind == "issuer-unavailable"
        else:
            assert raised.value.kind == "unauthenticated"
            assert raised.value.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
        return reason

    def _refused(self) -> list[tuple[str, float]]:
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return [(each.labels["reason"], each.value) for each in samples if each.name == "leasehold_jwt_refused_total"]


def forged(header: Mapping[str, Any], claims: Mapping[str, Any], signature: bytes = b"") -> str:
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


@pytest.mark.parametrize("key", ["rsa", "ec", "ed"])
async def test_a_jwt_of_each_kind_of_key_is_accepted_and_costs_one_signature(issuer: Issuer, key: str) -> None:
    verifying, token = Verifying(issuer), issuer.token(key, scope="usage:read admin")
    for _ in range(3):
        identity = await verifying.verifier.verify(token)
        assert identity[:4] == (issuer.url, "ada", "ada@example.com", frozenset({"usage:read"}))
    assert verifying.count("verified") == 1
    assert verifying.count("key_fetches", result="ok") == 1


async def test_an_audience_may_be_a_list(issuer: Issuer) -> None:
    assert await Verifying(issuer).verifier.verify(issuer.token(aud=["another", AUDIENCE]))


BAD_CLAIMS: Mapping[str, tuple[dict[str, Any], str]] = {
    "without exp": ({"exp": None}, "no_exp"),
    "without sub": ({"sub": None}, "no_sub"),
    "without iss": ({"iss": None}, "no_iss"),
    "without aud": ({"aud": None}, "no_aud"),
    "expired": ({"exp": 1_700_000_000}, "expired"),
    "not valid yet": ({"nbf": 4_000_000_000}, "not_yet_valid"),
    "issued in the future": ({"iat": 4_000_000_000}, "not_yet_valid"),
    "for another audience": ({"aud": "another"}, "audience"),
    "for no audience": ({"aud": []}, "no_aud"),
    "of another issuer": ({"iss": "https://login.example.com"}, "issuer"),
    "of nobody": ({"sub": ""}, "subject"),
    "of somebody without a name": ({"sub": "a\0b"}, "subject"),
    "exp is a text": ({"exp": "tomorrow"}, "malformed"),
    "exp is not finite": ({"exp": float("inf")}, "malformed"),
}


@pytest.mark.parametrize("case", BAD_CLAIMS)
async def test_a_jwt_with_bad_claims_is_refused_with_a_reason_in_the_metric_only(issuer: Issuer, case: str) -> None:
    (claims, reason), verifying = BAD_CLAIMS[case], Verifying(issuer)
    await verifying.verifier.keys.refresh()
    assert await verifying.reason(issuer.token(**claims)) == reason


async def test_clocks_may_differ_a_little(issuer: Issuer) -> None:
    verifying, now = Verifying(issuer, clock_skew_s=120.0), int(issuer.claims()["iat"])
    assert await verifying.verifier.verify(issuer.token(exp=now - 60))
    assert await verifying.verifier.verify(issuer.token(nbf=now + 60, iat=now + 60))
    assert await verifying.reason(issuer.token(exp=now - 180)) == "expired"


def public_pem(issuer: Issuer) -> bytes:
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    return issuer.keys["rsa"][0].public_key().public_bytes(serialization.Encoding.PEM, spki)


async def test_forged_signatures_and_algorithms_are_refused(issuer: Issuer) -> None:
    verifying, claims = Verifying(issuer), issuer.claims()
    good = issuer.token()
    head, _, signature = good.split(".")
    other = base64.urlsafe_b64encode(json.dumps(claims | {"sub": "eve"}).encode()).rstrip(b"=").decode()
    hmac_key = public_pem(issuer)
    hashed = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign
    confused = forged({"alg": "HS256", "kid": "rsa"}, claims)
    confused = f"{confused}{base64.urlsafe_b64encode(hashed(confused[:-1].encode(), hmac_key)).rstrip(b'=').decode()}"
    cases = {
        f"{head}.{other}.{signature}": "signature",
        forged({"alg": "none"}, claims): "algorithm",
        forged({"alg": "None", "kid": "rsa"}, claims): "algorithm",
        forged({"alg": ["RS256"], "kid": "rsa"}, claims): "algorithm",
        forged({"kid": "rsa"}, claims): "algorithm",
        confused: "algorithm",
        jwt.encode(claims, rsa_key(), "RS256", {"kid": "rsa"}): "signature",
        jwt.encode(claims, issuer.keys["rsa"][0], "PS256", {"kid": "rsa"}): "algorithm",
        jwt.encode(claims, issuer.keys["ec"][0], "ES256", {"kid": "rsa"}): "unknown_key",
        jwt.encode(claims, issuer.keys["rsa"][0], "RS256", {"kid": "gone"}): "unknown_key",
        jwt.encode(claims, issuer.keys["ec"][0], "ES256", {"kid": "ec", "crit": ["x"], "x": 1}): "malformed",
        forged({"alg": "RS256", "kid": 7}, claims): "malformed",
        forged({"alg": "RS256", "kid": "rsa"}, claims, b"x" * 256): "signature",
        "a.b.c": "malformed",
        "..": "malformed",
    }
    for token, reason in cases.items():
        assert await verifying.reason(token) == reason, reason
    assert await verifying.verifier.verify(good)


async def test_a_jwt_without_a_kid_needs_a_single_key(issuer: Issuer) -> None:
    nameless = jwt.encode(issuer.claims(), issuer.keys["ec"][0], "ES256")
    assert await Verifying(issuer).verifier.verify(nameless)
    issuer.publish("ec", "next")
    assert await Verifying(issuer).reason(nameless) == "unknown_key"


ANYTHING = st.none() | st.text() | st.booleans() | st.integers() | st.floats() | st.lists(st.text())


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(st.sampled_from(["alg", "kid", "typ", "b64", "crit", "jwk"]), ANYTHING),
    claims=st.dictionaries(st.sampled_from(["iss", "sub", "aud", "exp", "nbf", "scope"]), ANYTHING),
    signature=st.binary(max_size=80),
)
async def test_no_forged_jwt_is_accepted_or_breaks_the_verifier(
    issuer: Issuer, header: dict[str, Any], claims: dict[str, Any], signature: bytes
) -> None:
    verifying = Verifying(issuer)
    await verifying.verifier.keys.refresh()
    with pytest.raises(Problem):
        await verifying.verifier.verify(forged({"alg": "RS256", "kid": "rsa"} | header, claims, signature))


# --- keys ------------------------------------------------------------------------------------------------------------


async def test_a_key_that_is_new_is_fetched_once_and_the_old_one_stops_to_count(issuer: Issuer) -> None:
    verifying, old = Verifying(issuer), issuer.token("rsa")
    await verifying.verifier.verify(old)
    issuer.publish("next")
    fetched = issuer.fetches
    assert await verifying.verifier.verify(issuer.token("next", sub="grace"))
    assert issuer.fetches == fetched + 1
    assert verifying.verifier.find_known(old) is None
    assert await verifying.reason(old) == "unknown_key"
    assert issuer.fetches == fetched + 1  # another unknown key a moment later costs no fetch


async def test_jwts_of_others_cost_no_fetch(issuer: Issuer) -> None:
    verifying = Verifying(issuer)
    await verifying.verifier.keys.refresh()
    fetched = issuer.fetches
    foreign = jwt.encode(issuer.claims(iss="https://else.example"), rsa_key(), "RS256", {"kid": "theirs"})
    assert await verifying.reason(foreign) == "issuer"
    assert issuer.fetches == fetched


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


async def test_while_the_issuer_is_away_its_keys_are_used_for_a_bounded_time(issuer: Issuer) -> None:
    clock, metrics = Clock(), JwtMetrics(CollectorRegistry())
    keys = IssuerKeys(terms(issuer, keys_max_age_s=600.0), metrics, clock)
    await keys.refresh()
    assert keys.finding == ""
    issuer.stop()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await keys.refresh()
    assert [each["event"] for each in logs] == ["JWT keys cannot be fetched"]
    assert "ConnectError" in keys.finding
    assert keys.find("rsa", "RS256")
    clock.now_s += 601
    with pytest.raises(KeysUnavailable):
        keys.find("rsa", "RS256")
    assert "too old" in keys.finding
    issuer.start()
    clock.now_s += UNKNOWN_KEY_EVERY_S
    await keys.refresh_for_unknown_key()
    assert keys.finding == ""
    assert keys.find("rsa", "RS256")


async def test_without_any_key_a_jwt_is_answered_503(issuer: Issuer) -> None:
    issuer.stop()
    verifying = Verifying(issuer)
    assert await verifying.reason(issuer.token()) == "keys_unavailable"
    assert "none are known" in verifying.verifier.keys.finding
    assert verifying.count("key_fetches", result="failed") == 1


BAD_ANSWERS: Mapping[str, bytes] = {
    "no JSON": b"<html>",
    "a list": b"[]",
    "no keys": b"{}",
    "no list": b'{"keys": {"a": 1}}',
    "nothing usable": b'{"keys": [7, {}, {"kty": "oct", "k": "AAAA"}, {"kty": "RSA"}]}',
    "too large": b'{"keys": "' + b"x" * 1_100_000 + b'"}',
    "nested": b"[" * 200_000,
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
async def test_an_answer_without_keys_leaves_the_known_ones_in_use(issuer: Issuer, case: str) -> None:
    verifying = Verifying(issuer)
    await verifying.verifier.keys.refresh()
    (issuer.directory / "keys.json").write_bytes(BAD_ANSWERS[case])
    await verifying.verifier.keys.refresh()
    assert verifying.verifier.keys.finding
    assert await verifying.verifier.verify(issuer.token())


async def test_a_discovery_document_of_another_issuer_is_not_believed(issuer: Issuer) -> None:
    document = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys.json"}
    try:
        for wrong in ({"issuer": "https://else.example"}, {"jwks_uri": "http://10.0.0.1/keys"}, {"jwks_uri": "x"}):
            issuer.discover(**(document | wrong))
            assert await Verifying(issuer).reason(issuer.token()) == "keys_unavailable"
            assert await Verifying(issuer, keys_url=f"{issuer.url}/keys.json").verifier.verify(issuer.token())
    finally:
        issuer.discover(**document)


def test_only_keys_that_verify_signatures_are_taken() -> None:
    key, weak = public_jwk(rsa_key(), kid="a"), public_jwk(rsa_key(1024), kid="weak")
    odd: list[object] = [{**key, "use": "enc"}, {**key, "key_ops": ["encrypt"]}, {**key, "alg": "HS256"}, weak]
    odd += [
        {**key, "kid": 7},
        {**key, "key_ops": 7},
        {"kty": "oct", "k": "AAAA", "kid": "b"},
        {**key, "kty": ["RSA"]},
        "x",
    ]
    curve = public_jwk(ec.generate_private_key(ec.SECP384R1()), kid="c")
    found = list(signing_keys([*odd, {**key, "alg": "PS384"}, curve]))
    assert {each.name: set(each.algorithms) for each in found} == {"a": {"PS384"}, "c": {"ES384"}}


def test_a_private_key_that_an_issuer_publishes_is_not_read() -> None:
    private: dict[str, Any] = jwt.algorithms.ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()), as_dict=True)
    [found] = signing_keys([private])
    assert isinstance(found.key, ec.EllipticCurvePublicKey)


async def test_keys_come_over_tls_of_a_private_authority(tmp_path: Any) -> None:
    authority = Authority(tmp_path)
    issuer = Issuer(tmp_path / "public", free_port(), authority.issue("issuer"))
    issuer.start()
    try:
        assert await Verifying(issuer, ca_file=authority.file).verifier.verify(issuer.token())
        untrusted = Verifying(issuer)
        assert await untrusted.reason(issuer.token()) == "keys_unavailable"
    finally:
        issuer.stop()


# --- what is remembered ----------------------------------------------------------------------------------------------


async def test_a_remembered_jwt_is_refused_when_it_expires(issuer: Issuer) -> None:
    now = issuer.claims()["iat"]
    clock = Clock()
    clock.now_s = now
    verifying, token = Verifying(issuer, clock, clock_skew_s=0.0), issuer.token(exp=now + 60)
    await verifying.verifier.verify(token)
    clock.now_s = now + 59
    assert verifying.verifier.find_known(token)
    clock.now_s = now + 60
    assert verifying.verifier.find_known(token) is None


async def test_the_number_of_remembered_jwts_is_bounded(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.credentials.verify_jwt.REMEMBERED", 2)
    verifying = Verifying(issuer)
    tokens = [issuer.token("ec", sub=f"person-{number}") for number in range(3)]
    for token in tokens:
        await verifying.verifier.verify(token)
    assert [verifying.verifier.find_known(token) is not None for token in tokens] == [False, True, True]


def test_no_algorithm_with_a_shared_secret_can_be_allowed() -> None:
    assert not [each for each in ASYMMETRIC if each.startswith("HS") or each == "none"]
