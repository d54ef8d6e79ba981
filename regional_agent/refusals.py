"""What admission cannot decide, as the problem that the caller is told. One table for all doors."""

from doors.problems import InvalidParameter, Problem
from regional_agent.admission import NoPoliciesYet
from regional_agent.domain.subjects import InvalidAddress, InvalidSubjectValue
from regional_agent.policies import HoldNeeded, UnknownSubjectField
from regional_agent.store.scripts import OperationConflict

REFUSALS = (UnknownSubjectField, InvalidAddress, InvalidSubjectValue, OperationConflict, HoldNeeded, NoPoliciesYet)


def problem_of(error: Exception) -> Problem:
    """Raises what is no refusal."""
    match error:
        case UnknownSubjectField():
            fault = InvalidParameter(f"subject.{error.field}", "required", str(error))
            return Problem("invalid-request", f"{fault.field}: {fault.reason}", invalid_parameters=[fault])
        case InvalidAddress():
            fault = InvalidParameter("subject.ip", "address", str(error))
            return Problem("invalid-request", f"{fault.field}: {fault.reason}", invalid_parameters=[fault])
        case InvalidSubjectValue():
            fault = InvalidParameter(f"subject.{error.field}", error.rule, str(error))
            return Problem("invalid-request", f"{fault.field}: {fault.reason}", invalid_parameters=[fault])
        case OperationConflict():
            fault = InvalidParameter("operation_id", "same_body", "this operation_id was used before with another body")
            return Problem("operation-conflict", fault.reason, invalid_parameters=[fault])
        case HoldNeeded():
            return Problem("hold-needed", str(error))
        case NoPoliciesYet():
            return Problem("not-ready", "the agent has no policies yet", headers={"Retry-After": "1"})
        case _:
            raise error
