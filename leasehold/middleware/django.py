"""Middleware for a Django project.

In a module of the project, here `project/limits.py`, which MIDDLEWARE names as `"project.limits.limit"`:

    limit = partial(DjangoLimitMiddleware, check=client.check, subject=subject_of)

A view finds the decision in `request.limit_decision`.
"""

from collections.abc import Callable
from typing import Any

from leasehold.client.agent_protocol import Denied, RequestRejected, Subject
from leasehold.middleware.refusals import (
    CheckFunction,
    Refusal,
    headers_to_forward,
    refuse_denied,
    refuse_undecided,
)
from leasehold.middleware.wsgi import request_id_of

SubjectOf = Callable[[Any], Subject | None]


def by_route_and_address(request: Any) -> Subject:
    """Return what every request says about itself. A service that knows its tenants passes a function of its own."""
    subject = {"route": request.path, "method": request.method}
    address = request.META.get("REMOTE_ADDR")
    return subject | {"ip": address} if address else subject


class DjangoLimitMiddleware:
    """Check each request whose subject is not None, and answer those that are denied.

    `Denied`, raised by a view, is answered in the same way. Without `check`, this is all that the middleware does.
    With `show_policies` customers see the names of policies and quotas.
    """

    def __init__(
        self,
        get_response: Callable[[Any], Any],
        *,
        check: CheckFunction | None = None,
        subject: SubjectOf = by_route_and_address,
        show_policies: bool = False,
    ) -> None:
        self._get_response = get_response
        self._check = check
        self._subject = subject
        self._show_policies = show_policies

    def __call__(self, request: Any) -> Any:
        """Answer a request: with a refusal, or with the project's response and the RateLimit headers."""
        subject = None if self._check is None else self._subject(request)
        if self._check is None or subject is None:
            return self._get_response(request)
        try:
            decision = request.limit_decision = self._check(subject)
        except RequestRejected as rejection:
            return _response(refuse_undecided(rejection, request.path, request_id_of(request.META)))
        if not decision.allowed:
            return self.process_exception(request, Denied(decision))
        response = self._get_response(request)
        for name, value in headers_to_forward(decision, show_policies=self._show_policies).items():
            response.setdefault(name, value)
        return response

    def process_exception(self, request: Any, exception: Exception) -> Any:
        """Answer `Denied`, and leave other exceptions to Django, which calls this method if a view raises."""
        if not isinstance(exception, Denied):
            return None
        request_id = request_id_of(request.META)
        return _response(refuse_denied(exception.decision, request.path, request_id, show_policies=self._show_policies))


def _response(refusal: Refusal) -> Any:
    from django.http import HttpResponse  # noqa: PLC0415 - Django wants its settings before it is used

    headers = {name: value for name, value in refusal.headers.items() if name != "content-length"}
    return HttpResponse(refusal.body, status=refusal.status, headers=headers)
