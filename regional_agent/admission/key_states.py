"""One record for each quota key: everything that a decision reads and notes of it, found with one look.

The records are bounded. For a new one the longest unused is forgotten, unless it is needed: for units that lie here, or
for a share that is reported. No step looks at all of them.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice

from msgspec import Struct

from protocol.clock import Clock
from regional_agent.admission.rules.certain_denials import CertainDenial
from regional_agent.admission.rules.slices import LIFETIME_MS, Slice
from regional_agent.leasing.rules.demand import Demand, HotKey, hottest
from regional_agent.shared_limits.shared_limit import SharedLimit
from regional_agent.store.types import RateCharge, StoreDecision
from regional_agent.store_outage.rules.local_allowances import SeenLease

MOST_KEYS = 50_000
MOST_RECENT = 2_000  # among which the hottest are looked for
STEPS = 3  # to make room for one new record: those that are needed are passed over

RateSlice = Slice[RateCharge]


class KeyState(Struct, eq=False, gc=False):
    """This agent's state of one quota key. It refers to nothing that refers to it, so it needs no collector."""

    quota: str
    demand: Demand  # for a rate; of an allowance the leasing side counts it
    window_ends_ms: int  # of a window as long as a slice lasts, in which
    checks: int = 0  # so many checks were counted
    units: int = 0  # and so many units were requested
    slice: RateSlice | None = None  # units of a hot rate that lie here
    shared: SharedLimit | None = None  # a rate or slots that regions share by demand
    denials: dict[Hashable, CertainDenial[StoreDecision]] | None = None  # by the charges that were denied
    lease: SeenLease | None = None  # of an allowance, as the store reported it last, for an outage
    is_known: bool = True  # False: it was forgotten, and another record may have its place

    @property
    def is_needed(self) -> bool:
        return self.slice is not None or (self.shared is not None and self.shared.due_ms is not None)


class KeyStates:
    """The records of an agent, the latest used last."""

    def __init__(self, clock: Clock, most: int = MOST_KEYS) -> None:
        self._clock = clock
        self._most = most
        self._states: OrderedDict[str, KeyState] = OrderedDict()

    def of(self, quota: str) -> KeyState:
        """Return the record of a key, which is made where there is none."""
        state = self._states.get(quota)
        if state is None:
            now_ms = self._clock.monotonic_ms()
            state = self._states[quota] = KeyState(quota, Demand(now_ms), now_ms + LIFETIME_MS)
            if len(self._states) > self._most:
                self._forget_one()
        return state

    def find(self, quota: str) -> KeyState | None:
        return self._states.get(quota)

    def count(self, state: KeyState, units: int, checks: int, now_ms: int) -> None:
        """Count requested units, and the checks that requested them."""
        state.demand.units += units
        if now_ms < state.window_ends_ms:
            state.units += units
            state.checks += checks
            return
        state.window_ends_ms, state.units, state.checks = now_ms + LIFETIME_MS, units, checks
        if state.is_known:
            self._states.move_to_end(state.quota)

    def hottest(self, most: int) -> list[HotKey]:
        """Return the rates with the highest demand, the hottest first."""
        recent = ((state.quota, state.demand) for state in islice(reversed(self._states.values()), MOST_RECENT))
        return hottest(recent, self._clock.monotonic_ms(), most)

    def __len__(self) -> int:
        return len(self._states)

    def _forget_one(self) -> None:
        for _ in range(STEPS):
            quota, state = self._states.popitem(last=False)
            if not state.is_needed:
                state.is_known = False
                return
            self._states[quota] = state
