"""The public keys of an issuer of JWTs, kept up to date in the background.

They are fetched every five minutes, and once more when a JWT names a key that is not among them, at most every ten
seconds. While the issuer cannot be reached, the known keys stay in use for a bounded time.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import httpx
import jwt
import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from protocol.backoff import Backoff
from web.credentials.jwt_metrics import JwtMetrics
from web.credentials.jwt_settings import ELLIPTIC, RSA, JwtTerms, is_trustworthy

REFRESH_S = 300.0
UNKNOWN_KEY_EVERY_S = 10.0
FETCH_WITHIN_S = 5.0
RETRY_FIRST_S, RETRY_LONGEST_S = 1.0, 60.0
MAX_BYTES = 1_048_576
MAX_KEYS = 100
MIN_RSA_BITS = 2048
DISCOVERY = "/.well-known/openid-configuration"
_PUBLIC = ("kty", "n", "e", "crv", "x", "y")  # members of a JWK; a private key that an issuer publishes is not read

_log = structlog.get_logger(__name__)

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


class KeysUnavailable(Exception):
    """There are no keys, or they are too old to be used: no JWT can be verified now."""


class UnknownKey(Exception):
    """No key of the issuer has the name and the algorithm that a JWT asks for."""


class FetchFailed(Exception):
    """The issuer's answer has no usable keys."""


class SigningKey(NamedTuple):
    name: str | None  # `kid`
    algorithms: frozenset[str]
    key: PublicKey


class IssuerKeys:
    def __init__(self, terms: JwtTerms, metrics: JwtMetrics, clock_s: Callable[[], float] = monotonic) -> None:
        self._terms = terms
        self._metrics = metrics
        self._clock_s = clock_s
        self._keys: Sequence[SigningKey] = ()
        self._fetched_at_s: float | None = None
        self._asked_at_s: float | None = None  # because of an unknown key
        self._refreshing: asyncio.Task[None] | None = None
        self._fault = ""  # why the last fetch failed
        self.on_change: Callable[[], None] = lambda: None  # called when other keys are known than before
        self._tls = ssl.create_default_context()
        if terms.ca_file is not None:
            self._tls.load_verify_locations(terms.ca_file)

    async def run(self) -> None:
        """Fetch the keys again and again, for ever."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S)
        while True:
            await self.refresh()
            if self._fault:
                await asyncio.sleep(backoff.failed(0))
            else:
                backoff.succeeded()
                await asyncio.sleep(REFRESH_S)

    def find(self, name: str | None, algorithm: str) -> PublicKey:
        """Return the key that a JWT names. Without a name there must be only one. Raise UnknownKey, KeysUnavailable."""
        if self._fetched_at_s is None or self._clock_s() > self._fetched_at_s + self._terms.keys_max_age_s:
            raise KeysUnavailable
        found = [each for each in self._keys if algorithm in each.algorithms and name in (None, each.name)]
        if len(found) != 1:
            raise UnknownKey
        return found[0].key

    async def refresh(self) -> None:
        """Fetch the keys now. Concurrent callers share one fetch. A failure is logged once, and raises nothing."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
        await asyncio.shield(self._refreshing)

    async def refresh_for_unknown_key(self) -> None:
        """Fetch the keys, unless they were fetched for this reason a moment ago. Wait for a fetch that is under way."""
        now_s = self._clock_s()
        is_recent = self._asked_at_s is not None and now_s < self._asked_at_s + UNKNOWN_KEY_EVERY_S
        if is_recent and self._refreshing is None:
            return
        if not is_recent:
            self._asked_at_s = now_s
        await self.refresh()

    @property
    def finding(self) -> str:
        """Return what is wrong with the keys, for the health of the service; an empty text if nothing is."""
        if not self._fault:
            return ""
        issuer = f"the keys of the JWT issuer {self._terms.issuer} cannot be fetched ({self._fault})"
        if self._fetched_at_s is None:
            return f"{issuer}, and none are known: no JWT is accepted"
        left_s = self._fetched_at_s + self._terms.keys_max_age_s - self._clock_s()
        if left_s <= 0:
            return f"{issuer}, and the known ones are too old: no JWT is accepted"
        hours = self._terms.keys_max_age_s / 3600
        return f"{issuer}; the known ones are used for {hours:g} h after they were last fetched"

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(FETCH_WITHIN_S):
                keys = await self._fetch()
        except (httpx.HTTPError, httpx.InvalidURL, FetchFailed, TimeoutError, OSError) as error:
            self._note_failure(str(error) if isinstance(error, FetchFailed) else type(error).__name__)
        else:
            self._put_in_use(keys)
        finally:
            self._refreshing = None

    def _note_failure(self, fault: str) -> None:
        self._metrics.fetches.labels("failed").inc()
        if not self._fault:
            _log.warning("JWT keys cannot be fetched", issuer=self._terms.issuer, reason=fault)
        self._fault = fault

    def _put_in_use(self, keys: Sequence[SigningKey]) -> None:
        self._metrics.fetches.labels("ok").inc()
        self._metrics.fetched_at.set_to_current_time()
        if self._fault:
            _log.info("JWT keys fetched again", issuer=self._terms.issuer)
        self._fault = ""
        if self._fetched_at_s is None:
            self._asked_at_s = None  # the first keys answer for no key that is unknown among them
        self._fetched_at_s = self._clock_s()
        if keys != self._keys:
            self._keys = keys
            names = [each.name for each in keys]
            _log.info("JWT keys changed", issuer=self._terms.issuer, keys=names)
            self.on_change()

    async def _fetch(self) -> list[SigningKey]:
        async with httpx.AsyncClient(verify=self._tls, timeout=FETCH_WITHIN_S, trust_env=False) as client:
            document = await _get(client, self._terms.keys_url or await self._discover(client))
        found = document.get("keys")
        keys = list(signing_keys(found)) if isinstance(found, list) else []
        if not keys:
            raise FetchFailed("the key set has no key that can verify signatures")
        return keys

    async def _discover(self, client: httpx.AsyncClient) -> str:
        document = await _get(client, self._terms.issuer.rstrip("/") + DISCOVERY)
        if document.get("issuer") != self._terms.issuer:
            raise FetchFailed("its discovery document is another issuer's")
        url = document.get("jwks_uri")
        if not isinstance(url, str) or not is_trustworthy(url):
            raise FetchFailed("its discovery document has no jwks_uri that begins with https://")
        return url


async def _get(client: httpx.AsyncClient, url: str) -> Mapping[str, Any]:
    content = b""
    async with client.stream("GET", url, headers={"Accept": "application/json"}) as response:
        if response.status_code != httpx.codes.OK:
            raise FetchFailed(f"{url} answers {response.status_code}")
        async for part in response.aiter_bytes():
            content += part
            if len(content) > MAX_BYTES:
                raise FetchFailed(f"{url} answers more than {MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise FetchFailed(f"{url} answers no JSON object") from None


def signing_keys(found: Sequence[object]) -> Iterator[SigningKey]:
    """Yield the keys of a key set that can verify signatures, and skip all others, such as shared secrets."""
    for each in found[:MAX_KEYS]:
        with suppress(jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError):
            if isinstance(each, dict) and _is_for_signatures(each):
                yield from _signing_key(each)


def _is_for_signatures(data: Mapping[str, Any]) -> bool:
    return data.get("use", "sig") == "sig" and "verify" in data.get("key_ops", ["verify"])


def _signing_key(data: Mapping[str, Any]) -> Iterator[SigningKey]:
    able = RSA if data["kty"] == "RSA" else (ELLIPTIC[data["crv"]],)
    algorithms = frozenset(each for each in able if data.get("alg") in (None, each))
    public = {name: data[name] for name in _PUBLIC if name in data}
    key, name = jwt.PyJWK(public, able[0]).key, data.get("kid")
    is_strong = not isinstance(key, RSAPublicKey) or key.key_size >= MIN_RSA_BITS
    if algorithms and is_strong and isinstance(key, PublicKey) and isinstance(name, str | None):
        yield SigningKey(name, algorithms, key)
