"""Decide which callers an agent accepts.

An agent that other machines can reach requires its service token. One without a token listens on loopback only, and its
callers are local programs. But a web page in a local browser is one as well, if its domain name resolves to 127.0.0.1
(DNS rebinding). Browsers send the name that they connected to in `Host`, and the calling page in `Origin`: both must be
this machine's.

An agent may have a second token, the adjust token. It permits everything that the service token does, and only its
bearer may book beyond limits: `mode: adjust`, and commits beyond what a hold has set aside.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request

from protocol.addresses import is_loopback
from regional_agent.settings import AgentSettings
from web.problems import Problem
from web.tokens import same_token, token_in


class CallerRules:
    """Decides from a request's headers. The fast path and the framework's routes use the same object."""

    def __init__(self, settings: AgentSettings) -> None:
        token = settings.service_token
        self._token = token.get_secret_value() if token else None
        adjust_token = settings.adjust_token
        self._adjust_token = adjust_token.get_secret_value() if adjust_token else None
        # No browser reaches a unix socket, and clients name any host there.
        self._own_hosts = None if settings.uds else frozenset((settings.host.lower(),))

    def refusal(self, authorization: Sequence[str], host: Sequence[str], origin: Sequence[str]) -> Problem | None:
        """Return why the caller is refused, given the values of three headers, or None."""
        given = token_in(authorization[0]) if len(authorization) == 1 else None
        if self._adjust_token is not None and same_token(given, self._adjust_token):
            return None
        if self._token is not None:
            return None if same_token(given, self._token) else _no_token()
        if any(not self._is_own(f"//{value}") for value in host):
            return Problem("misdirected", "Without a service token an agent answers only under loopback names.")
        if any(not self._is_own(value) for value in origin):
            return Problem("foreign-origin", "Without a service token an agent answers no page of another origin.")
        return None

    def may_adjust(self, authorization: Sequence[str]) -> bool:
        """Return whether the caller may book beyond limits. Every caller may, unless there is an adjust token."""
        if self._adjust_token is None:
            return True
        return len(authorization) == 1 and same_token(token_in(authorization[0]), self._adjust_token)

    def request_may_adjust(self, request: Request) -> bool:
        return self.may_adjust(request.headers.getlist("authorization"))

    def _is_own(self, url: str) -> bool:
        if self._own_hosts is None:
            return True
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or name in self._own_hosts

    def check(self, request: Request) -> None:
        """Raise the Problem that refuses the caller, if any."""
        headers = request.headers
        if problem := self.refusal(*(headers.getlist(name) for name in ("authorization", "host", "origin"))):
            raise problem


def adjust_forbidden() -> Problem:
    detail = "Adjustments and commits beyond a hold need the agent's adjust token."
    return Problem("forbidden", detail)


def _no_token() -> Problem:
    headers = {"WWW-Authenticate": "Bearer"}
    return Problem("unauthenticated", "this agent asks for a token: Authorization: Bearer <token>", headers=headers)
