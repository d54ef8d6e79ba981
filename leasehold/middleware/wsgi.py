"""WSGI middleware that checks each request before the service sees it.

    application = WsgiLimitMiddleware(application, check=client.check, subject=subject_of)

The service's code finds the decision in `environ["leasehold.limit_decision"]`.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from leasehold.client.agent_protocol import Denied, RequestRejected, Subject
from leasehold.middleware.refusals import (
    CheckFunction,
    Refusal,
    headers_to_forward,
    refuse_denied,
    refuse_undecided,
)
from web.request_ids import harmless, new_request_id

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

Environ = dict[str, Any]
SubjectOf = Callable[[Environ], Subject | None]


def by_route_and_address(environ: Environ) -> Subject:
    """Return what every request says about itself. A service that knows its tenants passes a function of its own."""
    subject = {"route": path_of(environ), "method": environ["REQUEST_METHOD"]}
    return subject | {"ip": environ["REMOTE_ADDR"]} if environ.get("REMOTE_ADDR") else subject


def path_of(environ: Environ) -> str:
    """Return the decoded path, which WSGI has as bytes in the guise of Latin-1."""
    path: str = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return path.encode("latin-1").decode("utf-8", "replace") or "/"


def request_id_of(environ: Environ) -> str:
    """Return the caller's request id, or a new one."""
    return harmless(environ.get("HTTP_X_REQUEST_ID", "").encode("latin-1")) or new_request_id()


class WsgiLimitMiddleware:
    """Check each request whose subject is not None, and answer those that are denied.

    `Denied`, raised by the service before it returns its response, is answered in the same way. Without `check`, this
    is all that the middleware does. With `show_policies` customers see the names of policies and quotas.
    """

    def __init__(
        self,
        app: "WSGIApplication",
        *,
        check: CheckFunction | None = None,
        subject: SubjectOf = by_route_and_address,
        show_policies: bool = False,
    ) -> None:
        self._app = app
        self._check = check
        self._subject = subject
        self._show_policies = show_policies

    def __call__(self, environ: Environ, start_response: "StartResponse") -> Iterable[bytes]:
        """Answer a request: with a refusal, or with the service's response and the RateLimit headers."""
        response = _Response(start_response)
        try:
            self._require_allowed(environ, response)
            return self._app(environ, response)
        except Denied as denied:
            path, request_id = path_of(environ), request_id_of(environ)
            return response.refuse(refuse_denied(denied.decision, path, request_id, show_policies=self._show_policies))
        except RequestRejected as rejection:
            return response.refuse(refuse_undecided(rejection, path_of(environ), request_id_of(environ)))

    def _require_allowed(self, environ: Environ, response: "_Response") -> None:
        """Check the request, and raise Denied."""
        subject = None if self._check is None else self._subject(environ)
        if self._check is None or subject is None:
            return
        decision = self._check(subject)
        environ["leasehold.limit_decision"] = decision
        if not decision.allowed:
            raise Denied(decision)
        response.headers = headers_to_forward(decision, show_policies=self._show_policies)


class _Response:
    """The `start_response` of one request: the service's with more headers, or that of a refusal."""

    def __init__(self, start_response: "StartResponse") -> None:
        self._start_response = start_response
        self._has_begun = False
        self.headers: Mapping[str, str] = {}

    def __call__(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None, /
    ) -> Callable[[bytes], object]:
        self._has_begun = True
        return self._start_response(status, [*headers, *self.headers.items()], exc_info)

    def refuse(self, refusal: Refusal) -> Iterable[bytes]:
        """Answer in place of the service. A response that it has announced is replaced, if nothing was sent of it."""
        status = f"{refusal.status} {HTTPStatus(refusal.status).phrase}"
        self._start_response(status, list(refusal.headers.items()), sys.exc_info() if self._has_begun else None)
        return [refusal.body]
