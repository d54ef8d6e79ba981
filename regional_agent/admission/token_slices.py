"""The token slices of an agent: when one is taken from the store, which requests it answers, when it is returned.

A request that finds little left of a slice asks for more, and a callback adds the units, whether that request still
exists or not. At most one refill of a key is under way.

The store decides what a slice cannot answer. Before it denies a request that units of a slice might have helped, they
are returned to it, and it is asked once more.
"""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from protocol.clock import Clock
from regional_agent.admission.key_states import KeyState, RateSlice
from regional_agent.admission.policies import PolicyCharge
from regional_agent.admission.rules.modes import BEYOND_LIMITS, LOOKS, REFUND
from regional_agent.admission.rules.slices import HOT, LIFETIME_MS, Slice
from regional_agent.leasing.epoch import EpochManager
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.check_calls import CheckBatcher
from regional_agent.store.types import (
    Outcome,
    PolicyDecision,
    RateCharge,
    RequestRun,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
)


class TokenSlices:
    def __init__(self, batcher: CheckBatcher, epochs: EpochManager, share_loop: ShareLoop, clock: Clock) -> None:
        self._batcher = batcher
        self._epochs = epochs
        self._share_loop = share_loop
        self._clock = clock
        self.held: dict[str, KeyState] = {}  # the keys that have a slice
        self._valid_in: tuple[StoreIncarnation | None, int] = None, 0  # the incarnation and the shares of the slices
        self._emptied_at_ms = -1  # requests sent until then were sent under other limits
        self._sweeping: asyncio.TimerHandle | None = None
        self.taken = 0  # slices, so far

    # --- for admission ------------------------------------------------------------------------------------------------

    def decide(
        self, policy_charges: Sequence[PolicyCharge], request: StoreRequest, now_ms: int
    ) -> StoreDecision | None:
        """Decide a request if slices hold everything that it takes. Otherwise return None, and take nothing."""
        if request.operation is not None:
            return None  # only the store knows whether an operation was admitted before
        self._drop_stale_slices()
        slices = None if request.mode == REFUND else _take(policy_charges, now_ms)
        if slices is None:
            if request.mode in BEYOND_LIMITS:  # it may fill a bucket, or drive it below zero: return what lies here
                self.return_units(policy_charges, now_ms)
            return None
        if request.mode in LOOKS:
            _put_back(slices, policy_charges)
        return StoreDecision(True, False, [self._answer(each.state, now_ms) for each in policy_charges])

    def _answer(self, state: KeyState, now_ms: int) -> PolicyDecision:
        slice_ = state.slice
        assert slice_ is not None
        if slice_.left <= slice_.low_water and not slice_.is_under_way:
            self._refill(state, slice_, slice_.charge, now_ms)
        remaining, reset_ms = slice_.remaining(now_ms)
        return PolicyDecision(0, slice_.limit, remaining, reset_ms, 0, remaining, 0, 0)

    def apply(
        self,
        policy_charges: Sequence[PolicyCharge],
        request: StoreRequest,
        decisions: Sequence[StoreDecision],
        asked_at_ms: int,
        now_ms: int,
    ) -> Sequence[StoreDecision]:
        """Add the units that lie here to decisions of the store; take slices of the request's rates if they are hot.

        The decisions are of equal requests, and all admit them unless there is only one. The request has been counted.
        """
        last = decisions[-1]
        # A request that needs the store for one of its charges needs it for all: then no slice pays.
        is_hot = all(each.state.checks >= HOT and now_ms < each.state.window_ends_ms for each in policy_charges)
        if is_hot and last.allowed and request.may_slice and asked_at_ms > self._emptied_at_ms:
            self._slice(policy_charges, last.policies, asked_at_ms, now_ms)
        if not self.held or all(each.state.slice is None for each in policy_charges):
            return decisions
        return [_with_slices(policy_charges, decision, asked_at_ms, now_ms) for decision in decisions]

    def return_units(self, policy_charges: Iterable[PolicyCharge], since_ms: int) -> bool:
        """Return all slices of some charges. True if any was returned since then, so the store may decide otherwise."""
        now_ms, was_returned = self._clock.monotonic_ms(), False
        for each in policy_charges:
            slice_ = each.state.slice
            if slice_ is not None:
                self._return(each.state, slice_, now_ms)
                was_returned = was_returned or slice_.returned_at_ms >= since_ms
        return was_returned

    def return_key(self, quota: str) -> None:
        """Return what lies here of a key: it has been reset."""
        state = self.held.get(quota)
        if state is not None and state.slice is not None:
            self._return(state, state.slice, self._clock.monotonic_ms())

    def units_here(self, quota: str) -> int:
        state = self.held.get(quota)
        return 0 if state is None or state.slice is None else state.slice.left

    def return_all(self) -> None:
        """Return all slices: limits or shares have changed, or the agent shuts down."""
        self._emptied_at_ms = self._clock.monotonic_ms()
        for state, slice_ in self._drop_all():
            self._return(state, slice_, self._emptied_at_ms)

    def close(self) -> None:
        self.return_all()
        if self._sweeping is not None:
            self._sweeping.cancel()

    # --- refills ------------------------------------------------------------------------------------------------------

    def _drop_all(self) -> list[tuple[KeyState, RateSlice]]:
        dropped = [(state, state.slice) for state in self.held.values() if state.slice is not None]
        self.held = {}
        for state, _ in dropped:
            state.slice = None
        return dropped

    def _drop_stale_slices(self) -> None:
        """Drop slices of another incarnation of the store, which does not know them; return those of other shares."""
        incarnation, shares = self._epochs.current, self._share_loop.raises
        is_same_incarnation = incarnation is self._valid_in[0] or incarnation == self._valid_in[0]
        if is_same_incarnation and shares == self._valid_in[1]:
            return
        if not is_same_incarnation:
            self._drop_all()
        self.return_all()
        self._valid_in = incarnation, shares

    def _slice(
        self,
        policy_charges: Iterable[PolicyCharge],
        policies: Iterable[PolicyDecision],
        asked_at_ms: int,
        now_ms: int,
    ) -> None:
        self._drop_stale_slices()
        for each, policy in zip(policy_charges, policies, strict=True):
            charge = each.charge
            assert isinstance(charge, RateCharge)
            slice_ = each.state.slice or Slice(charge, now_ms)
            slice_.update(policy.limit, policy.available, policy.last_grant, asked_at_ms)
            if slice_.left <= slice_.low_water and not slice_.is_under_way:
                self._refill(each.state, slice_, charge, now_ms)

    def _refill(self, state: KeyState, slice_: RateSlice, charge: RateCharge, now_ms: int) -> None:
        incarnation, units = self._epochs.current, slice_.refill_units(charge.cost, now_ms)
        if incarnation is None or not units:
            slice_.low_water = max(0, slice_.left - 1) // 2  # the next look is at half of that, not at each request
            return
        self._share_loop.record_demand(state, charge, slice_.uncounted_units(), now_ms, size=charge.cost)
        state.slice, self.held[state.quota] = slice_, state
        slice_.is_under_way = True
        taken = StoreRequest("enforce", (replace(charge, cost=units),))
        on_refill = partial(self._on_refill, state, slice_, units, incarnation, now_ms)
        self._batcher.submit(incarnation, RequestRun(taken, 1, on_refill))
        if self._sweeping is None:
            self._schedule_sweep()

    def _on_refill(
        self,
        state: KeyState,
        slice_: RateSlice,
        units: int,
        incarnation: StoreIncarnation,
        asked_at_ms: int,
        outcomes: Sequence[Outcome],
    ) -> None:
        slice_.is_under_way = False
        (decision,) = outcomes
        if isinstance(decision, Exception) or not decision.allowed:
            return
        now_ms = self._clock.monotonic_ms()
        (policy,) = decision.policies
        self.taken += 1
        self._share_loop.record_bucket(state, slice_.charge, policy.available, policy.last_grant, now_ms)
        slice_.add(units, now_ms)
        slice_.update(policy.limit, policy.available, policy.last_grant, asked_at_ms)
        if state.slice is not slice_ and incarnation == self._epochs.current:
            self._return(state, slice_, now_ms)  # the slice was dropped meanwhile

    def _return(self, state: KeyState, slice_: RateSlice, now_ms: int) -> bool:
        """Return what is left of a slice; False if that is nothing. The store books it before later calls."""
        incarnation, units = self._epochs.current, slice_.take_rest(now_ms)
        charge = slice_.charge
        self._share_loop.record_demand(state, charge, slice_.uncounted_units(), now_ms, size=charge.cost)
        if incarnation is None or not units:
            return False
        self._batcher.submit(
            incarnation, RequestRun(StoreRequest("adjust", (replace(charge, cost=-units),)), 1, _ignore)
        )
        return True

    def _schedule_sweep(self) -> None:
        self._sweeping = asyncio.get_running_loop().call_later(LIFETIME_MS / 1000, self._sweep)

    def _sweep(self) -> None:
        now_ms, self._sweeping = self._clock.monotonic_ms(), None
        self._drop_stale_slices()
        for quota, state in list(self.held.items()):
            slice_ = state.slice
            if slice_ is None or (slice_.is_over(now_ms) and not self._return(state, slice_, now_ms)):
                state.slice = None  # one sweep later: a request may have been under way while it was returned
                del self.held[quota]
        if self.held:
            self._schedule_sweep()


def _take(policy_charges: Sequence[PolicyCharge], now_ms: int) -> list[RateSlice] | None:
    """Take all charges from slices, or none."""
    slices: list[RateSlice] = []
    for each in policy_charges:
        slice_ = each.state.slice
        if slice_ is None or not slice_.take(each.charge.cost, now_ms):
            _put_back(slices, policy_charges)
            return None
        slices.append(slice_)
    return slices


def _put_back(slices: Iterable[RateSlice], policy_charges: Iterable[PolicyCharge]) -> None:
    for slice_, each in zip(slices, policy_charges, strict=False):  # only the first ones were taken
        slice_.put_back(each.charge.cost)


def _with_slices(
    policy_charges: Sequence[PolicyCharge], decision: StoreDecision, asked_at_ms: int, now_ms: int
) -> StoreDecision:
    pairs = zip(policy_charges, decision.policies, strict=True)
    policies = [_with_slice(each.state.slice, policy, asked_at_ms, now_ms) for each, policy in pairs]
    return replace(decision, policies=policies)


def _with_slice(slice_: RateSlice | None, policy: PolicyDecision, asked_at_ms: int, now_ms: int) -> PolicyDecision:
    if slice_ is None:
        return policy
    slice_.update(policy.limit, policy.available, policy.last_grant, asked_at_ms)
    if not slice_.left:
        return policy
    remaining, reset_ms = slice_.remaining(now_ms)
    return replace(policy, remaining=remaining, reset_ms=reset_ms)


def _ignore(_: Sequence[Outcome]) -> None:
    """Do nothing. Units that are lost with the call are missing in the bucket until the rate has refilled it."""
