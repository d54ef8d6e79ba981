"""An issuer of JWTs as a process: a small web server of its discovery document and its public keys.

A test publishes keys, signs JWTs with them or with others, counts how often they were fetched, and stops the server.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from leasehold.local_stack.processes import spawn, stop, wait_until
from tests.waiting import BOUND_S

AUDIENCE = "leasehold-test"
KEYS = "keys.json"
Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def public_jwk(key: Key, **more: Any) -> dict[str, Any]:
    kinds = {rsa.RSAPrivateKey: RSAAlgorithm, ec.EllipticCurvePrivateKey: ECAlgorithm}
    algorithm: Any = next((found for kind, found in kinds.items() if isinstance(key, kind)), OKPAlgorithm)
    shown: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return {name: value for name, value in shown.items() if name != "key_ops"} | more


class Issuer:
    def __init__(self, directory: Path, port: int, certificate: tuple[Path, Path] | None = None) -> None:
        self.directory = directory
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "tests.issuer", directory, str(port), *(certificate or ())]
        self._process: subprocess.Popen[bytes] | None = None
        self.keys: Mapping[str, tuple[Key, str]] = {
            "rsa": (rsa_key(), "RS256"),
            "ec": (ec.generate_private_key(ec.SECP256R1()), "ES256"),
            "ed": (ed25519.Ed25519PrivateKey.generate(), "EdDSA"),
            "next": (ec.generate_private_key(ec.SECP256R1()), "ES256"),  # not published at the start
        }
        (directory / ".well-known").mkdir(parents=True)
        self.discover(issuer=self.url, jwks_uri=f"{self.url}/{KEYS}")
        self.publish("rsa", "ec", "ed")

    def start(self) -> None:
        if self._process is None:
            log, before = self.directory / "log", self._log().count("listening")
            self._process = spawn(self._command, log=log)
            assert wait_until(lambda: self._log().count("listening") > before, BOUND_S), self._log()

    def stop(self) -> None:
        if self._process is not None:
            stop(self._process)
            self._process = None

    def reset(self) -> None:
        """Be as at the start."""
        self.publish("rsa", "ec", "ed")
        self.start()

    @property
    def fetches(self) -> int:
        """Return how often the keys were fetched."""
        return self._log().count(f"GET /{KEYS}")

    def discover(self, **document: str) -> None:
        (self.directory / ".well-known" / "openid-configuration").write_text(json.dumps(document))

    def publish(self, *names: str) -> None:
        self.publish_jwks(public_jwk(self.keys[name][0], kid=name, use="sig") for name in names)

    def publish_jwks(self, keys: Iterable[Mapping[str, Any]]) -> None:
        written = self.directory / "written"
        written.write_text(json.dumps({"keys": list(keys)}))
        written.replace(self.directory / KEYS)

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Return good claims with changes; a claim that is changed to None is left out."""
        now = int(time.time())
        usual = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ada",
            "iat": now,
            "exp": now + 300,
            "email": "ada@example.com",
        }
        return {name: value for name, value in (usual | changed).items() if value is not None}

    def token(self, key: str = "rsa", headers: Mapping[str, Any] | None = None, **claims: Any) -> str:
        """Sign a JWT, which names its key."""
        private, algorithm = self.keys[key]
        return jwt.encode(self.claims(**claims), private, algorithm, {"kid": key, **(headers or {})})

    def _log(self) -> str:
        log = self.directory / "log"
        return log.read_text() if log.exists() else ""


def main(directory: str, port: str, *certificate: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), partial(SimpleHTTPRequestHandler, directory=directory))
    if certificate:
        import ssl  # noqa: PLC0415 - most issuers of tests need none

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    sys.stderr.write("listening\n")
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
