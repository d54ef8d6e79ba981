"""Decide which callers of the gRPC door may call which method: by the rules of the HTTP door, for each head once."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from regional_agent.envoy.door.heads import RequestHead, parse_head
from regional_agent.envoy.door.hpack import Header
from regional_agent.envoy.door.methods import GrpcError, Methods, Status, StreamMethod, UnaryMethod
from regional_agent.http.callers import CallerRules
from web.problems import Problem
from web.tls.peers import PeerCertificate, peer_certificate_of

_STATUSES = {"unauthenticated": Status.UNAUTHENTICATED}  # of a caller that is refused; else PERMISSION_DENIED


class AuthorizedHead(NamedTuple):
    """A head with the method that it names, or why the call is refused."""

    path: str  # as metrics name it
    metadata: Mapping[str, str]
    content_length: int | None
    unary: UnaryMethod | None = None
    stream: StreamMethod | None = None
    refusal: GrpcError | None = None
    http_status: int = 0  # of a request that is no gRPC
    unverified: RequestHead | None = None  # where the caller's JWT is not known
    expires_at_s: float = math.inf  # by the clock of the machine


class DoorCallers:
    def __init__(self, rules: CallerRules, methods: Methods, public: Sequence[str] = ()) -> None:
        """`public` are the methods that need no token, as the health checks of the HTTP door."""
        self._rules = rules
        self._methods = methods
        self._public = frozenset(public)

    def on_change(self, call: Callable[[], None]) -> None:
        """Call a function whenever other callers are accepted than before."""
        self._rules.on_change.append(call)

    def identified(self, transport: asyncio.Transport) -> PeerCertificate | None:
        """Return the certificate of a connection's client, if it stands for a token."""
        return self._rules.identified(peer_certificate_of(transport))

    def authorize(self, headers: Sequence[Header], certificate: PeerCertificate | None) -> AuthorizedHead:
        """Raises MalformedRequest."""
        request = parse_head(headers)
        if request.http_status:
            return AuthorizedHead("other", {}, request.content_length, http_status=request.http_status)
        found = self._permitted(request, certificate)
        if found.refusal is not None and self._rules.may_become_known(request.values(b"authorization")):
            return found._replace(refusal=None, unverified=request)
        return found

    async def verify(self, head: AuthorizedHead) -> AuthorizedHead:
        """Return the head of a caller whose JWT has been verified, or refused."""
        assert head.unverified is not None
        try:
            await self._rules.verify(head.unverified.values(b"authorization"))
        except Problem as problem:
            return head._replace(refusal=_refusal(problem), unverified=None)
        return self._permitted(head.unverified)

    def _permitted(self, request: RequestHead, certificate: PeerCertificate | None = None) -> AuthorizedHead:
        path = request.path
        head = AuthorizedHead(
            path,
            request.metadata(),
            request.content_length,
            self._methods.unary.get(path),
            self._methods.streams.get(path),
        )
        if path not in self._public:
            # Every name is this agent's: proxies send that of their cluster. No page of a browser can call gRPC.
            authorization, origin = request.values(b"authorization"), request.values(b"origin")
            permission = self._rules.permission(authorization, (), origin, certificate)
            if isinstance(permission, Problem):
                return head._replace(refusal=_refusal(permission))
            head = head._replace(expires_at_s=permission.expires_at_s)
        if head.unary is None and head.stream is None:
            refusal = GrpcError(Status.UNIMPLEMENTED, f"there is no method {path[:200]!r} here")
            return head._replace(path="other", refusal=refusal)
        return head


def _refusal(problem: Problem) -> GrpcError:
    return GrpcError(_STATUSES.get(problem.kind, Status.PERMISSION_DENIED), problem.detail)
