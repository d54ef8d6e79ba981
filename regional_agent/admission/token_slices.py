"""Slices in the life of an agent: when one is taken, what is answered from it, when it goes back.

Nothing here belongs to a request, and nothing is a coroutine: a slice is asked for by whoever finds that little is left
of it, and comes to a callback, whether that request is still there or not. One is under way for each key at most.

Whatever a slice cannot answer is asked of the store, and what lies here counts there, too: before a request is denied
that it might have helped, it goes back, and the store is asked once more.
"""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from protocol.clock import Clock
from regional_agent.admission.rules.modes import BEYOND_LIMITS, LOOKS
from regional_agent.admission.rules.slices import HOT, LIFE_MS, Heat, Slice
from regional_agent.leasing.epoch import EpochManager
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.batcher import CheckBatcher, for_each_outcome
from regional_agent.store.types import Charge, Decision, PolicyDecision, RateCharge, StoreIncarnation, StoreRequest

RateSlice = Slice[RateCharge]


class Slicing:
    def __init__(self, batcher: CheckBatcher, epochs: EpochManager, share_loop: ShareLoop, clock: Clock) -> None:
        self._batcher = batcher
        self._epochs = epochs
        self._share_loop = share_loop
        self._clock = clock
        self._slices: dict[str, RateSlice] = {}
        self._heat = Heat()
        self._of: tuple[StoreIncarnation | None, int] = (
            None,
            0,
        )  # the incarnation and the shares that they were taken in
        self._emptied_at_ms = -1  # what was asked until then was asked by other limits
        self._sweeping: asyncio.TimerHandle | None = None
        self.taken = 0  # slices, so far

    # --- asked by admission ------------------------------------------------------------------------------------------

    def decide(self, request: StoreRequest) -> Decision | None:
        """From slices alone, if they hold all that the request takes. Nothing has happened otherwise."""
        if not self._slices or request.operation is not None:
            return None  # an operation may have been admitted before, and is known to the store only
        self._look_around()
        now_ms = self._clock.monotonic_ms()
        slices = self._take(request.charges, now_ms)
        if slices is None:
            if request.mode in BEYOND_LIMITS:  # it takes what is not there: also what is here
                self.give_back(request.charges, now_ms)
            return None
        if request.mode in LOOKS:
            _put_back(slices, request.charges)
        if len(slices) == 1:
            return Decision(True, False, [self._answer(slices[0], now_ms)])
        return Decision(True, False, [self._answer(each, now_ms) for each in slices])

    def _take(self, charges: Iterable[Charge], now_ms: int) -> list[RateSlice] | None:
        """All of them, or none."""
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
            self._refill(slice_, slice_.of, now_ms)
        remaining, reset_ms = slice_.told(now_ms)
        return PolicyDecision(0, slice_.limit, remaining, reset_ms, 0, remaining, 0, 0)

    def heard(self, request: StoreRequest, decisions: Sequence[Decision], asked_at_ms: int) -> Sequence[Decision]:
        """What the store answered to the same request, all admitted or one, with what lies here.

        And from now on, maybe, a slice of each of its rates.
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

    def _with_slices(self, request: StoreRequest, decision: Decision, asked_at_ms: int, now_ms: int) -> Decision:
        pairs = zip(request.charges, decision.policies, strict=True)
        policies = [self._told(charge, policy, asked_at_ms, now_ms) for charge, policy in pairs]
        return replace(decision, policies=policies)

    def _told(self, charge: Charge, policy: PolicyDecision, asked_at_ms: int, now_ms: int) -> PolicyDecision:
        slice_ = self._slices.get(charge.quota)
        if slice_ is None:
            return policy
        slice_.heard(policy.limit, policy.available, policy.last_grant, asked_at_ms)
        if not slice_.left:
            return policy
        remaining, reset_ms = slice_.told(now_ms)
        return replace(policy, remaining=remaining, reset_ms=reset_ms)

    def give_back(self, charges: Iterable[Charge], asked_at_ms: int) -> bool:
        """All that lies here of them. True if anything went back since then: the store may decide otherwise by now."""
        now_ms = self._clock.monotonic_ms()
        slices = [self._slices[charge.quota] for charge in charges if charge.quota in self._slices]
        for slice_ in slices:
            self._return(slice_, now_ms)
        return any(slice_.returned_at_ms >= asked_at_ms for slice_ in slices)

    def units_here(self, quota: str) -> int:
        slice_ = self._slices.get(quota)
        return 0 if slice_ is None else slice_.left

    def give_back_all(self) -> None:
        """Limits or shares are others by now, or the agent leaves."""
        slices, self._slices = self._slices, {}
        self._emptied_at_ms = self._clock.monotonic_ms()
        for slice_ in slices.values():
            self._return(slice_, self._emptied_at_ms)

    def close(self) -> None:
        self.give_back_all()
        if self._sweeping is not None:
            self._sweeping.cancel()

    # --- within ------------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """A store that is another incarnation knows nothing of what was taken; other shares are other rates."""
        incarnation, shares = self._epochs.current, self._share_loop.heard
        is_same_incarnation = incarnation is self._of[0] or incarnation == self._of[0]
        if is_same_incarnation and shares == self._of[1]:
            return
        if not is_same_incarnation:
            self._slices.clear()
        self.give_back_all()
        self._of = incarnation, shares

    def _is_hot(self, charges: Iterable[Charge], now_ms: int, times: int) -> bool:
        """All of them are: a request that needs the store for one of them needs it for all."""
        return min([self._heat.note(charge.quota, now_ms, times) for charge in charges]) >= HOT

    def _slice(
        self, charges: Iterable[Charge], policies: Iterable[PolicyDecision], asked_at_ms: int, now_ms: int
    ) -> None:
        self._look_around()
        for charge, policy in zip(charges, policies, strict=True):
            assert isinstance(charge, RateCharge)
            slice_ = self._slices.get(charge.quota) or Slice(charge, now_ms)
            slice_.heard(policy.limit, policy.available, policy.last_grant, asked_at_ms)
            if slice_.left <= slice_.low_water and not slice_.is_under_way:
                self._refill(slice_, charge, now_ms)

    def _refill(self, slice_: RateSlice, charge: RateCharge, now_ms: int) -> None:
        incarnation, units = self._epochs.current, slice_.wants(charge.cost, now_ms)
        if incarnation is None or not units:
            slice_.low_water = max(0, slice_.left - 1) // 2  # looked at again then, and not at each request
            return
        self._share_loop.note(charge, slice_.spent_since_asked(), charge.cost)
        self._slices[charge.quota] = slice_
        slice_.is_under_way = True
        taken = StoreRequest("enforce", (charge._replace(cost=units),))
        self._batcher.submit(
            incarnation, taken, for_each_outcome(partial(self._came, slice_, units, incarnation, now_ms))
        )
        if self._sweeping is None:
            self._sweep_later()

    def _came(
        self,
        slice_: RateSlice,
        units: int,
        incarnation: StoreIncarnation,
        asked_at_ms: int,
        decision: Decision | Exception,
    ) -> None:
        slice_.is_under_way = False
        if isinstance(decision, Exception) or not decision.allowed:
            return
        now_ms = self._clock.monotonic_ms()
        (policy,) = decision.policies
        self.taken += 1
        self._share_loop.look(slice_.of, policy.available, policy.last_grant)
        slice_.add(units, now_ms)
        slice_.heard(policy.limit, policy.available, policy.last_grant, asked_at_ms)
        if self._slices.get(slice_.of.quota) is not slice_ and incarnation == self._epochs.current:
            self._return(slice_, now_ms)  # nobody waits for it any more

    def _return(self, slice_: RateSlice, now_ms: int) -> bool:
        """What is left, and is not lost to a bucket that ran full. It is heard before whatever is asked after it."""
        incarnation, units = self._epochs.current, slice_.taken_back(now_ms)
        charge = slice_.of
        self._share_loop.note(charge, slice_.spent_since_asked(), charge.cost)
        if incarnation is None or not units:
            return False
        self._batcher.submit(incarnation, StoreRequest("adjust", (charge._replace(cost=-units),)), _nobody_hears)
        return True

    def _sweep_later(self) -> None:
        self._sweeping = asyncio.get_running_loop().call_later(LIFE_MS / 1000, self._sweep)

    def _sweep(self) -> None:
        now_ms, self._sweeping = self._clock.monotonic_ms(), None
        self._look_around()
        for quota, slice_ in list(self._slices.items()):
            if slice_.is_over(now_ms) and not self._return(slice_, now_ms):
                del self._slices[quota]  # a sweep later, for who was asking while it went back
        if self._slices:
            self._sweep_later()


def _put_back(slices: Iterable[RateSlice], charges: Iterable[Charge]) -> None:
    for slice_, charge in zip(slices, charges, strict=False):  # those that were taken, from the first on
        slice_.put_back(charge.cost)


def _nobody_hears(_: Sequence[Decision | Exception]) -> None:
    """Lost with its call, it is missing in the bucket until the rate has brought it again."""
