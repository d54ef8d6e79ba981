"""Denials that the store is certain to repeat, so that callers over their rate cost it no calls."""

from msgspec.structs import replace

from protocol.clock import Clock
from protocol.outcomes import DenialReason
from regional_agent.admission.rules.certain_denials import CertainDenials
from regional_agent.leasing.epoch import EpochManager
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.types import RateCharge, StoreDecision, StoreIncarnation, StoreRequest

Circumstances = tuple[StoreIncarnation | None, int]  # the store's incarnation, and how often shares have grown


class DenialCache:
    """Denials by rates, valid for one incarnation of the store and one set of shares."""

    def __init__(self, epochs: EpochManager, share_loop: ShareLoop, clock: Clock) -> None:
        self._epochs = epochs
        self._share_loop = share_loop
        self._clock = clock
        self._denials: CertainDenials[StoreDecision] = CertainDenials()
        self.circumstances: Circumstances = None, 0

    def find(self, request: StoreRequest) -> StoreDecision | None:
        """Return the denial that the store would repeat, with its times as they are by now."""
        incarnation, shares = self.circumstances
        if incarnation is not self._epochs.current or shares != self._share_loop.raises:
            self._denials.clear()
            self.circumstances = self._epochs.current, self._share_loop.raises
        if not self._denials or not request.is_repeatable:
            return None
        now_ms = self._clock.monotonic_ms()
        cached = self._denials.find(request.charges, now_ms)
        return None if cached is None else _later(cached.decision, now_ms - cached.asked_at_ms)

    def remember(
        self, request: StoreRequest, decision: StoreDecision, asked_at_ms: int, circumstances: Circumstances
    ) -> None:
        """Keep what a rate denies. Units of an allowance may arrive at any moment, so its denials are not kept."""
        until_ms = [
            policy.retry_after_ms
            for charge, policy in zip(request.charges, decision.policies, strict=True)
            if isinstance(charge, RateCharge) and policy.reason == DenialReason.RATE_EXCEEDED and not charge.is_shadow
        ]
        if until_ms and request.is_repeatable and circumstances is self.circumstances:
            self._denials.keep(request.charges, decision, asked_at_ms, max(until_ms))

    def clear(self) -> None:
        self._denials.clear()


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
