"""Plans of checks by the bytes or values that they came as: under the same policies equal checks have equal plans.

Services send the same few checks all day. Decoding one and finding its policies costs more than deciding it.
"""

from collections.abc import Hashable
from typing import TypeVar

from regional_agent.admission.engine import Admission
from regional_agent.admission.plan import CheckPlan
from regional_agent.admission.policies import Policies
from regional_agent.admission.rules.generational_cache import GenerationalCache

MAX_PLANS = 4_096

K = TypeVar("K", bound=Hashable)
P = TypeVar("P", bound=CheckPlan)


class CheckCache(GenerationalCache[K, P]):
    def __init__(self, admission: Admission) -> None:
        super().__init__(MAX_PLANS)
        self._admission = admission
        self._valid_under: Policies | None = None

    def find(self, check: K) -> P | None:
        if self._valid_under is not self._admission.policies:
            self._valid_under = self._admission.policies
            self.clear()
        plan = self._young.get(check) or self.get(check)
        if plan is not None:
            for each in plan.policy_charges:
                if not each.state.is_known:
                    return None
        return plan

    def keep(self, check: K, plan: P) -> None:
        """Keep the plan of a check that was not found. One with an operation, or of a blocked subject, is not kept."""
        if plan.is_cacheable:
            self.put(check, plan)
