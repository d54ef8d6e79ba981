"""The problems that answer requests which admission refuses to plan: one table for the fast path and the routes."""

from protocol.limits.subjects import InvalidAddress, InvalidSubjectValue
from regional_agent.admission.engine import NoPoliciesYet
from regional_agent.admission.plan import InvalidField
from regional_agent.admission.policies import HoldNeeded, UnknownSubjectField
from regional_agent.admission.rules.ceilings import AboveCeiling
from regional_agent.store.types import OperationConflict
from web.problems import InvalidParameter, Problem

REFUSALS = (
    InvalidField,
    UnknownSubjectField,
    InvalidAddress,
    InvalidSubjectValue,
    OperationConflict,
    HoldNeeded,
    NoPoliciesYet,
    AboveCeiling,
)


def problem_of(error: Exception) -> Problem:
    """Return the problem for a refusal. Any other exception is raised again."""
    match error:
        case InvalidField():
            return _invalid(error.field, error.rule, str(error))
        case UnknownSubjectField():
            return _invalid(f"subject.{error.field}", "required", str(error))
        case InvalidAddress():
            return _invalid("subject.ip", "address", str(error))
        case InvalidSubjectValue():
            return _invalid(f"subject.{error.field}", error.rule, str(error))
        case AboveCeiling():
            return _invalid(error.field, "maximum", str(error))
        case _:
            return _problem_of_state(error)


def _problem_of_state(error: Exception) -> Problem:
    match error:
        case OperationConflict():
            fault = InvalidParameter(
                "operation_id", "same_body", "this operation_id was used before with another body; use a new one"
            )
            return Problem("operation-conflict", fault.reason, invalid_parameters=[fault])
        case HoldNeeded():
            return Problem("hold-needed", str(error))
        case NoPoliciesYet():
            return Problem(
                "not-ready",
                "the agent has not received its policies yet; retry in a second",
                headers={"Retry-After": "1"},
            )
        case _:
            raise error


def _invalid(field: str, rule: str, reason: str) -> Problem:
    fault = InvalidParameter(field, rule, reason)
    return Problem("invalid-request", f"{field}: {reason}", invalid_parameters=[fault])
