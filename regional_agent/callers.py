"""Who may call an agent.

An agent that others can reach asks for its service token. One that asks for none listens on loopback only, and there
the callers are local programs; but a web page in a local browser is one as well, if its domain name was made to point
to 127.0.0.1 (DNS rebinding). Browsers say which name they were given, in `Host`, and which page calls, in `Origin`:
both have to be this machine's.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request

from doors.problems import Problem
from doors.tokens import same_token, token_in
from regional_agent.settings import AgentSettings, is_loopback


class CallerRules:
    """Decides from a request's headers. The fast door and the framework's routes ask the same object."""

    def __init__(self, settings: AgentSettings) -> None:
        token = settings.service_token
        self._token = token.get_secret_value() if token else None
        # No browser reaches a unix socket, and clients name any host there.
        self._own_hosts = None if settings.uds else frozenset((settings.host.lower(),))

    def refusal(self, authorization: Sequence[str], host: Sequence[str], origin: Sequence[str]) -> Problem | None:
        """Return why the caller is refused, given the values of three headers, or None."""
        if self._token is not None:
            given = token_in(authorization[0]) if len(authorization) == 1 else None
            return None if same_token(given, self._token) else _no_token()
        if any(not self._is_own(f"//{value}") for value in host):
            return Problem("misdirected", "Without a service token an agent answers only under loopback names.")
        if any(not self._is_own(value) for value in origin):
            return Problem("foreign-origin", "Without a service token an agent answers no page of another origin.")
        return None

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


def _no_token() -> Problem:
    headers = {"WWW-Authenticate": "Bearer"}
    return Problem("unauthenticated", "this agent asks for a token: Authorization: Bearer <token>", headers=headers)
