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
from regional_agent.admission.rules.modes import BEYOND_LIMITS, LOOKS
from regional_agent.admission.rules.slices import HOT, LIFETIME_MS, Heat, Slice
from regional_agent.leasing.epoch import EpochManager
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.batcher import CheckBatcher, for_each_outcome
from regional_agent.store.types import Charge, PolicyDecision, RateCharge, StoreDecision, StoreIncarnation, StoreRequest

RateSlice = Slice[RateCharge]


class TokenSlices:
    def __init__(self, batcher: CheckBatcher, epochs: EpochManager, share_loop: ShareLoop, clock: Clock) -> None:
        self._batcher = batcher
        self._epochs = epochs
        self._share_loop = share_loop
        self._clock = clock
        self._slices: dict[str, RateSlice] = {}
        self._heat = Heat()
        self._valid_in: tuple[StoreIncarnation | None, int] = None, 0  # the incarnation and the shares of the slices
        self._emptied_at_ms = -1  # requests sent until then were sent under other limits
        self._sweeping: asyncio.TimerHandle | None = None
        self.taken = 0  # slices, so far

    # --- for admission ------------------------------------------------------------------------------------------------

    def decide(self, request: StoreRequest) -> StoreDecision | None:
        """Decide a request if slices hold everything that it takes. Otherwise return None, and take nothing."""
        if not self._slices or request.operation is not None:
            return None  # only the store knows whether an operation was admitted before
        self._drop_stale_slices()
        now_ms = self._clock.monotonic_ms()
        slices = self._take(request.charges, now_ms)
        if slices is None:
            if request.mode in BEYOND_LIMITS:  # it may drive a bucket below zero: return what lies here first
                self.return_units(request.charges, now_ms)
            return None
        if request.mode in LOOKS:
            _put_back(slices, request.charges)
        if len(slices) == 1:
            return StoreDecision(True, False, [self._answer(slices[0], now_ms)])
        return StoreDecision(True, False, [self._answer(each, now_ms) for each in slices])

    def _take(self, charges: Iterable[Charge], now_ms: int) -> list[RateSlice] | None:
        """Take all charges from slices, or none."""
        slices: list[RateSlice] = []
        for charge in charges:
            slice_ = self._slices.get(charge.quota)
            if slice_ is None or not slice_.take(charge.cost, now_ms):
                _put_back(slices, charges)
                return None
            slices.append(slice_)
        return slices

    def _answer(self, slice_: RateSlice, now_ms: int) -> PolicyDecision:
        if slice_.left <= slice_.low_water and not slice_.is_under_way:
            self._refill(slice_, slice_.charge, now_ms)
        remaining, reset_ms = slice_.remaining(now_ms)
        return PolicyDecision(0, slice_.limit, remaining, reset_ms, 0, remaining, 0, 0)

    def apply(
        self, request: StoreRequest, decisions: Sequence[StoreDecision], asked_at_ms: int
    ) -> Sequence[StoreDecision]:
        """Add the units that lie here to decisions of the store; take slices of the request's rates if they are hot.

        The decisions are of equal requests, and all admit them unless there is only one.
        """
        last = decisions[-1]
        if last.allowed and request.may_slice:
            now_ms = self._clock.monotonic_ms()
            if asked_at_ms > self._emptied_at_ms and self._is_hot(request.charges, now_ms, len(decisions)):
                self._slice(request.charges, last.policies, asked_at_ms, now_ms)
        if not self._slices or not any(charge.quota in self._slices for charge in request.charges):
            return decisions
        now_ms = self._clock.monotonic_ms()
        return [self._with_slices(request, decision, asked_at_ms, now_ms) for decision in decisions]

    def _with_slices(
        self, request: StoreRequest, decision: StoreDecision, asked_at_ms: int, now_ms: int
    ) -> StoreDecision:
        pairs = zip(request.charges, decision.policies, strict=True)
        policies = [self._with_slice(charge, policy, asked_at_ms, now_ms) for charge, policy in pairs]
        return replace(decision, policies=policies)

    def _with_slice(self, charge: Charge, policy: PolicyDecision, asked_at_ms: int, now_ms: int) -> PolicyDecision:
        slice_ = self._slices.get(charge.quota)
        if slice_ is None:
            return policy
        slice_.update(policy.limit, policy.available, policy.last_grant, asked_at_ms)
        if not slice_.left:
            return policy
        remaining, reset_ms = slice_.remaining(now_ms)
        return replace(policy, remaining=remaining, reset_ms=reset_ms)

    def return_units(self, charges: Iterable[Charge], since_ms: int) -> bool:
        """Return all slices of some charges. True if any was returned since then, so the store may decide otherwise."""
        now_ms = self._clock.monotonic_ms()
        slices = [self._slices[charge.quota] for charge in charges if charge.quota in self._slices]
        for slice_ in slices:
            self._return(slice_, now_ms)
        return any(slice_.returned_at_ms >= since_ms for slice_ in slices)

    def units_here(self, quota: str) -> int:
        slice_ = self._slices.get(quota)
        return 0 if slice_ is None else slice_.left

    def return_all(self) -> None:
        """Return all slices: limits or shares have changed, or the agent shuts down."""
        slices, self._slices = self._slices, {}
        self._emptied_at_ms = self._clock.monotonic_ms()
        for slice_ in slices.values():
            self._return(slice_, self._emptied_at_ms)

    def close(self) -> None:
        self.return_all()
        if self._sweeping is not None:
            self._sweeping.cancel()

    # --- refills ------------------------------------------------------------------------------------------------------

    def _drop_stale_slices(self) -> None:
        """Drop slices of another incarnation of the store, which does not know them; return those of other shares."""
        incarnation, shares = self._epochs.current, self._share_loop.raises
        is_same_incarnation = incarnation is self._valid_in[0] or incarnation == self._valid_in[0]
        if is_same_incarnation and shares == self._valid_in[1]:
            return
        if not is_same_incarnation:
            self._slices.clear()
        self.return_all()
        self._valid_in = incarnation, shares

    def _is_hot(self, charges: Iterable[Charge], now_ms: int, times: int) -> bool:
        """Return whether all charges are hot: a request that needs the store for one of them needs it for all."""
        return min([self._heat.note(charge.quota, now_ms, times) for charge in charges]) >= HOT

    def _slice(
        self, charges: Iterable[Charge], policies: Iterable[PolicyDecision], asked_at_ms: int, now_ms: int
    ) -> None:
        self._drop_stale_slices()
        for charge, policy in zip(charges, policies, strict=True):
            assert isinstance(charge, RateCharge)
            slice_ = self._slices.get(charge.quota) or Slice(charge, now_ms)
            slice_.update(policy.limit, policy.available, policy.last_grant, asked_at_ms)
            if slice_.left <= slice_.low_water and not slice_.is_under_way:
                self._refill(slice_, charge, now_ms)

    def _refill(self, slice_: RateSlice, charge: RateCharge, now_ms: int) -> None:
        incarnation, units = self._epochs.current, slice_.refill_units(charge.cost, now_ms)
        if incarnation is None or not units:
            slice_.low_water = max(0, slice_.left - 1) // 2  # the next look is at half of that, not at each request
            return
        self._share_loop.record_demand(charge, slice_.uncounted_units(), charge.cost)
        self._slices[charge.quota] = slice_
        slice_.is_under_way = True
        taken = StoreRequest("enforce", (charge._replace(cost=units),))
        self._batcher.submit(
            incarnation, taken, for_each_outcome(partial(self._on_refill, slice_, units, incarnation, now_ms))
        )
        if self._sweeping is None:
            self._schedule_sweep()

    def _on_refill(
        self,
        slice_: RateSlice,
        units: int,
        incarnation: StoreIncarnation,
        asked_at_ms: int,
        decision: StoreDecision | Exception,
    ) -> None:
        slice_.is_under_way = False
        if isinstance(decision, Exception) or not decision.allowed:
            return
        now_ms = self._clock.monotonic_ms()
        (policy,) = decision.policies
        self.taken += 1
        self._share_loop.record_bucket(slice_.charge, policy.available, policy.last_grant)
        slice_.add(units, now_ms)
        slice_.update(policy.limit, policy.available, policy.last_grant, asked_at_ms)
        if self._slices.get(slice_.charge.quota) is not slice_ and incarnation == self._epochs.current:
            self._return(slice_, now_ms)  # the slice was dropped meanwhile

    def _return(self, slice_: RateSlice, now_ms: int) -> bool:
        """Return what is left of a slice; False if that is nothing. The store books it before later calls."""
        incarnation, units = self._epochs.current, slice_.take_rest(now_ms)
        charge = slice_.charge
        self._share_loop.record_demand(charge, slice_.uncounted_units(), charge.cost)
        if incarnation is None or not units:
            return False
        self._batcher.submit(incarnation, StoreRequest("adjust", (charge._replace(cost=-units),)), _ignore)
        return True

    def _schedule_sweep(self) -> None:
        self._sweeping = asyncio.get_running_loop().call_later(LIFETIME_MS / 1000, self._sweep)

    def _sweep(self) -> None:
        now_ms, self._sweeping = self._clock.monotonic_ms(), None
        self._drop_stale_slices()
        for quota, slice_ in list(self._slices.items()):
            if slice_.is_over(now_ms) and not self._return(slice_, now_ms):
                del self._slices[quota]  # one sweep later: a request may have been under way while it was returned
        if self._slices:
            self._schedule_sweep()


def _put_back(slices: Iterable[RateSlice], charges: Iterable[Charge]) -> None:
    for slice_, charge in zip(slices, charges, strict=False):  # only the first ones were taken
        slice_.put_back(charge.cost)


def _ignore(_: Sequence[StoreDecision | Exception]) -> None:
    """Do nothing. Units that are lost with the call are missing in the bucket until the rate has refilled it."""
