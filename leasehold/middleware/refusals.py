"""Responses to customers of a service: headers for those that are admitted, and problem documents for the others."""

import itertools
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import msgspec

from leasehold.client.agent_protocol import Decision, RequestRejected, Subject
from protocol.check import Denial
from protocol.denials import denial_of
from protocol.problems import MEDIA_TYPE, PROBLEMS

# How limits are enforced is no business of customers: to them these kinds of a denial are one.
KINDS_FOR_CUSTOMERS = {
    "no-lease": "quota-exceeded",
    "cut-off": "quota-exceeded",
    "region-drained": "quota-exceeded",
    "store-unavailable": "not-ready",
    "coordinator-unavailable": "not-ready",
}
DETAILS_FOR_CUSTOMERS = {
    "quota-exceeded": "The request exceeds what is left of its limit",
    "cost-above-limit": "The request costs more than its limit ever allows at once",
    "blocked": "This request is blocked",
    "not-ready": "The limit for this request cannot be checked now",
}
_NAME_OF_POLICY = re.compile(r'(^|, )"[^"]*"')


class CheckFunction(Protocol):
    """A check that blocks: `Client.check`."""

    def __call__(self, subject: Subject, /) -> Decision: ...


class Refusal(NamedTuple):
    """The response to a request that the service does not see."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def refuse_denied(decision: Decision, path: str, request_id: str, *, show_policies: bool) -> Refusal:
    """Return the response to a denied request."""
    denial = denial_of(decision, path, request_id)
    document = denial if show_policies else document_for_customers(denial)
    headers = headers_to_forward(decision, show_policies=show_policies)
    if decision.retry_after_ms is not None:  # a decision of the failure mode brings no headers
        headers = {"retry-after": str(-(-decision.retry_after_ms // 1000)), **headers}
    return _refusal(denial.status, headers, document)


def refuse_undecided(rejection: RequestRejected, path: str, request_id: str) -> Refusal:
    """Return the response if no decision could be made, as by an engine that has just started and has no policies yet.

    Raise the rejection of an invalid check, which is the service's mistake and not its customer's.
    """
    if rejection.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise rejection
    document = {**rejection.problem, "instance": path, "request_id": request_id}
    return _refusal(rejection.status, {"retry-after": "1"}, document)


def _refusal(status: int, headers: Mapping[str, str], document: object) -> Refusal:
    body = msgspec.json.encode(document)
    return Refusal(status, {**headers, "content-type": MEDIA_TYPE, "content-length": str(len(body))}, body)


def document_for_customers(denial: Denial) -> Mapping[str, Any]:
    """Return the problem document of a denial without names of policies and quotas."""
    slug = denial.type.rpartition("/")[2]
    slug = KINDS_FOR_CUSTOMERS.get(slug, slug)
    can_retry = denial.retry_after_ms is not None and slug != "blocked"
    when = f"; try again in {-(-(denial.retry_after_ms or 0) // 1000)} s" if can_retry else ""
    return {
        "type": f"/problems/{slug}",
        "title": PROBLEMS[slug].title,
        "status": denial.status,
        "detail": f"{DETAILS_FOR_CUSTOMERS[slug]}{when}",
        "instance": denial.instance,
        "request_id": denial.request_id,
        "retry_after_ms": denial.retry_after_ms,
    }


def headers_to_forward(decision: Decision, *, show_policies: bool) -> Mapping[str, str]:
    """Return the RateLimit headers of a decision. Without `show_policies` its policies are called limit-1, limit-2 …"""
    if show_policies:
        return decision.headers
    return {
        name: _with_numbers(value) if name in ("ratelimit", "ratelimit-policy") else value
        for name, value in decision.headers.items()
    }


def _with_numbers(value: str) -> str:
    """Number the policies of a header: RateLimit and RateLimit-Policy list them in the same order."""
    numbers = itertools.count(1)
    return _NAME_OF_POLICY.sub(lambda match: f'{match[1]}"limit-{next(numbers)}"', value)
