"""Denials that the store is certain to repeat, so that callers over their rate cost it no calls.

A denial is kept in the record of the key that denied.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from protocol.outcomes import DenialReason
from regional_agent.admission.key_states import KeyState
from regional_agent.admission.policies import PolicyCharge
from regional_agent.admission.rules.certain_denials import certain_denial
from regional_agent.leasing.epoch import EpochManager
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.types import RateCharge, StoreDecision, StoreIncarnation, StoreRequest

MOST_OF_A_KEY = 8  # denials: a key is asked for with few sets of charges


# What a denial is valid under: one incarnation of the store, and one set of shares, by how often shares have grown.
Circumstances = tuple[StoreIncarnation | None, int]


class DenialCache:
    def __init__(self, epochs: EpochManager, share_loop: ShareLoop) -> None:
        self._epochs = epochs
        self._share_loop = share_loop

    @property
    def circumstances(self) -> Circumstances:
        """Return the circumstances now. A denial of a request that was sent under others is not kept."""
        return self._epochs.current, self._share_loop.raises

    def find(self, state: KeyState, request: StoreRequest, now_ms: int) -> StoreDecision | None:
        """Return the denial by a key that the store would repeat, with its times as they are by now."""
        denial = None if state.denials is None else state.denials.get(request.charges)
        if denial is None or now_ms >= denial.until_ms or not request.is_repeatable:
            return None
        is_valid = denial.circumstances == self.circumstances
        return _later(denial.decision, now_ms - denial.asked_at_ms) if is_valid else None

    def remember(
        self,
        policy_charges: Sequence[PolicyCharge],
        request: StoreRequest,
        decision: StoreDecision,
        asked_at_ms: int,
        circumstances: Circumstances,
    ) -> None:
        """Keep what a rate denies. Units of an allowance may arrive at any moment, so its denials are not kept."""
        denying = [
            (policy.retry_after_ms, each.state)
            for each, policy in zip(policy_charges, decision.policies, strict=True)
            if isinstance(each.charge, RateCharge)
            and policy.reason == DenialReason.RATE_EXCEEDED
            and not each.charge.is_shadow
        ]
        if not denying or not request.is_repeatable or circumstances != self.circumstances:
            return
        retry_after_ms, state = max(denying, key=lambda pair: pair[0])
        if state.denials is None or len(state.denials) >= MOST_OF_A_KEY:
            state.denials = {}
        state.denials[request.charges] = certain_denial(decision, circumstances, asked_at_ms, retry_after_ms)


def _later(decision: StoreDecision, elapsed_ms: int) -> StoreDecision:
    policies = [
        replace(
            policy,
            reset_ms=max(0, policy.reset_ms - elapsed_ms),
            retry_after_ms=max(0, policy.retry_after_ms - elapsed_ms),
        )
        for policy in decision.policies
    ]
    return StoreDecision(False, False, policies)
