"""Explain the example requests of a limits document: which of its policies match each of them."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from coordinator.database.connection import Connection
from protocol.check import RequestExplanation
from protocol.limits.document import LimitsDocument
from protocol.limits.explain import Explainer
from protocol.limits.subjects import fields_of


class ExplainedExample(Struct, frozen=True):
    """An example of the document, with the policies that match it."""

    example: int  # its place in `examples`
    explanation: RequestExplanation


async def plans_of_examples(connection: Connection, document: LimitsDocument) -> dict[str, str]:
    """Return the plans of the tenants that the examples name. Others are on the default plan."""
    tenants = {each.subject.tenant for each in document.examples if each.subject.tenant is not None}
    return {row["tenant"]: row["plan"] for row in await connection.fetch(_PLANS, sorted(tenants))}


def explain_examples(document: LimitsDocument, plans: Mapping[str, str]) -> list[ExplainedExample]:
    """Explain each example. It takes a moment for a document with thousands of policies."""
    explainer, found = Explainer(document), []
    for place, example in enumerate(document.examples):
        plan = plans.get(example.subject.tenant or "", document.default_plan)
        explanation = explainer.explain(fields_of(example.subject), plan)
        matching = [policy for policy in explanation.policies if policy.matches]
        found.append(ExplainedExample(place, replace(explanation, policies=matching)))
    return found


_PLANS = "SELECT tenant, plan FROM subscription WHERE tenant = ANY ($1::text[])"
