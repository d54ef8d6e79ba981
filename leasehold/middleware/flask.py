"""Checks for a Flask application.

    install_limits(app, check=client.check, subject=lambda request: {"tenant": …, "route": request.path})

A view finds the decision in `flask.g.limit_decision`.
"""

from collections.abc import Callable

from flask import Flask, Request, Response, g, request

from leasehold.client.agent_protocol import Decision, Denied, RequestRejected, Subject
from leasehold.middleware.refusals import (
    CheckFunction,
    Refusal,
    headers_to_forward,
    refuse_denied,
    refuse_undecided,
)
from leasehold.middleware.wsgi import request_id_of

SubjectOf = Callable[[Request], Subject | None]


def by_route_and_address(request: Request) -> Subject:
    """Return what every request says about itself. A service that knows its tenants passes a function of its own."""
    subject = {"route": request.path, "method": request.method}
    return subject | {"ip": request.remote_addr} if request.remote_addr else subject


def install_limits(
    app: Flask,
    *,
    check: CheckFunction | None = None,
    subject: SubjectOf = by_route_and_address,
    show_policies: bool = False,
) -> None:
    """Check each request whose subject is not None, and answer those that are denied.

    `Denied`, raised by a view, is answered in the same way. Without `check`, this is all that is installed. With
    `show_policies` customers see the names of policies and quotas.
    """

    def refuse(denied: Denied) -> Response:
        request_id = request_id_of(request.environ)
        return _response(refuse_denied(denied.decision, request.path, request_id, show_policies=show_policies))

    def check_request() -> Response | None:
        found = None if check is None else subject(request)
        if check is None or found is None:
            return None
        try:
            g.limit_decision = check(found)
        except RequestRejected as rejection:
            return _response(refuse_undecided(rejection, request.path, request_id_of(request.environ)))
        return None if g.limit_decision.allowed else refuse(Denied(g.limit_decision))

    def add_headers(response: Response) -> Response:
        decision: Decision | None = g.get("limit_decision")
        if decision is not None and decision.allowed:
            response.headers.update(dict(headers_to_forward(decision, show_policies=show_policies)))
        return response

    app.before_request(check_request)
    app.after_request(add_headers)
    app.register_error_handler(Denied, refuse)


def _response(refusal: Refusal) -> Response:
    return Response(refusal.body, refusal.status, dict(refusal.headers))
