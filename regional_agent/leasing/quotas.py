"""What this agent wants of each allowance, and the requests that wait for it.

A check that leaves little sets a flag here; the conversation (reporting.py) takes the flags along in its next
exchange. A request waits only when the lease is spent and its policy lets it: then its cost is part of what is asked.
Of what is central no lease is there to be spent, and each request asks (asking.py).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import structlog

from protocol.clock import Clock
from protocol.messages import ExchangeReply, LeaseReply, LeaseWant
from protocol.outcomes import GrantRefusal
from protocol.units import MAX_UNITS
from regional_agent.admission.rules.denial_causes import LeaseOutlook
from regional_agent.leasing.central import Answer, Asking
from regional_agent.leasing.demands import MOST_FOLLOWED, MOST_RECENT, Want, Wants
from regional_agent.leasing.rules.contact import CoordinatorContact
from regional_agent.leasing.rules.demand import Demand
from regional_agent.leasing.rules.refill import LONGEST_PAUSE_MS, RETRY_MS, low_water
from regional_agent.leasing.rules.set_aside import SET_ASIDE_MS, SetAside
from regional_agent.store.types import PolicyDecision

log = structlog.get_logger()

MOST_KEYS = 10_000  # of rates
MOST_DUE = 100  # that are asked for in one exchange
SAY_AGAIN_MS = 60_000
# A lease that had expired is good again once it has returned what was left, and after an epoch that is over there is
# another: who waits goes on waiting.
HOPEFUL = (None, GrantRefusal.LEASE_EXPIRED, GrantRefusal.EPOCH_FENCED)
# Nothing will be granted before the period ends, unless a limit is raised.
USED_UP = (GrantRefusal.EXHAUSTED, GrantRefusal.NO_LIMIT, GrantRefusal.TOTAL_TOO_LARGE)
UNANSWERED_MS = 1_000  # until nobody waits any more: for so long, a message that was lost is said again
LOOK_AT_HELD_MS = 10_000  # no script of a lease that nobody asks for would see that a hold has run out


class HotKey(NamedTuple):
    quota: str
    demand_milli: int


class Leasing:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wants = Wants()
        self._hints = 0  # that concern all quotas
        self._to_give_back: set[str] = set()  # central ones, of which some may lie idle
        self.turned_away = 0  # times that an allowance was not followed, for there are too many
        self._turned_away_again_ms = 0
        self._rates: OrderedDict[str, Demand] = OrderedDict()
        self._central: frozenset[str] = frozenset()
        self._is_cut_off = False
        self.contact = CoordinatorContact()
        self.set_aside = SetAside()  # wants that the coordinator refused as they are
        self.round_trip_ms = 0
        self.look_at_held_ms = LOOK_AT_HELD_MS
        self.wake = asyncio.Event()

    # --- told by admission --------------------------------------------------------------------------------------------

    def note(self, quota: str, units: int, decision: PolicyDecision) -> None:
        """A request asked for so many units: count the demand, and ask for more below the low water mark."""
        want = self._want(quota)
        self._wants.touch(want)
        want.demand.note(units, decision.limit)
        now_ms = self._clock.monotonic_ms()
        if want.backoff.is_pausing(now_ms) or want.wanted or want.asking is not None:
            return
        if self._is_set_aside(quota, now_ms):
            return
        demand_milli = want.demand.per_second_milli(now_ms)
        if decision.available <= low_water(decision.last_grant, demand_milli, self.round_trip_ms):
            self._ask(want)

    def note_rate(self, quota: str, units: int) -> None:
        """Of a rate nothing is leased: it is measured for whoever asks what is hot."""
        demand = self._rates.get(quota)
        if demand is None:
            demand = self._rates[quota] = Demand(self._clock.monotonic_ms())
            if len(self._rates) > MOST_KEYS:
                self._rates.popitem(last=False)
        else:
            self._rates.move_to_end(quota)
        demand.note(units)

    def note_held(self, quota: str, units: int) -> None:
        want = self._want(quota)
        if not want.held:
            want.look_at_ms = self._clock.monotonic_ms() + self.look_at_held_ms
        want.held += units
        self._wants.changed(want)

    def may_wait(self, quota: str) -> bool:
        """Return whether more units may come.

        Not while the region is cut off, was told that nothing is left, or has set the quota aside, nor if the quota is
        not followed.
        """
        now_ms = self._clock.monotonic_ms()
        want = self._want(quota)
        is_hopeless = self.contact.is_lost(now_ms) or self._is_set_aside(quota, now_ms) or not want.is_followed
        return not (is_hopeless or want.backoff.is_pausing(now_ms))

    async def wait(self, quota: str, units: int, timeout_ms: int) -> bool:
        """Wait for the next news of a quota with these units asked for. False if none came in time."""
        news, in_time = self.waits(quota, units), False
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                in_time = await news.wait()
        except TimeoutError:
            self.waited_in_vain(quota)
        finally:
            self.waits_no_more(quota, units)
        return in_time

    def waits(self, quota: str, units: int) -> asyncio.Event:
        """A request does, until there is news."""
        want = self._want(quota)
        want.waiting += units
        want.changed = want.changed or asyncio.Event()
        self._ask(want)
        return want.changed

    def waited_in_vain(self, quota: str) -> None:
        """Nothing came in time. Who was not even answered hopes on for a while: what was lost is said again."""
        want, now_ms = self._want(quota), self._clock.monotonic_ms()
        if want.asked_at_ms is None or now_ms >= want.asked_at_ms + UNANSWERED_MS:
            want.back_off(now_ms)

    def waits_no_more(self, quota: str, units: int) -> None:
        want = self._want(quota)
        want.waiting = max(0, want.waiting - units)
        self._wants.changed(want)

    # --- of what is central -------------------------------------------------------------------------------------------

    def follow(self, central: frozenset[str]) -> None:
        """Of these quotas nothing is leased ahead, from now on: what lies here of them goes back."""
        if central == self._central:
            return
        self._central = central
        for want in list(self._wants):
            if (want.asking is not None) != self._is_central(want.quota):
                self._change_mode(want)
                self._wants.changed(want)

    def _change_mode(self, want: Want) -> None:
        if want.asking is not None:
            want.asking.tell_all(Answer.LOOK)
            want.asking = None
            return
        want.asking = Asking()
        self._tell(want)
        if want.renew_at_ms is not None:
            self._ask(want)

    def _is_central(self, quota: str) -> bool:
        return quota.partition(":")[0] in self._central

    async def ask(self, quota: str, units: int, timeout_ms: int, *, again: bool) -> Answer:
        """Have the coordinator asked for the units of one request. Whoever may look says `looked` when it has."""
        want = self._want(quota)
        if want.asking is None:
            return Answer.LOOK if await self.wait(quota, units, timeout_ms) else Answer.TIMED_OUT
        is_asked_for = want.is_followed and not self._is_set_aside(quota, self._clock.monotonic_ms())
        if self._is_cut_off or not is_asked_for:
            return Answer.CUT_OFF
        if not again:
            want.retry_at_ms = 0
        want.waiting += units
        self._ask(want)
        try:
            return await want.asking.ask(timeout_ms)
        finally:
            want.waiting -= units
            self._wants.changed(want)

    def looked(self, quota: str) -> None:
        asking = self._want(quota).asking
        if asking is not None and asking.taking:
            asking.looked()
            if asking.returns:
                self._to_give_back.add(quota)
                self.wake.set()

    def gives_back_later(self, quota: str) -> bool:
        """What lies idle of it goes back in the conversation's next turn, for there are requests that may take it."""
        asking = self._want(quota).asking if self._is_central(quota) else None
        if asking is None:
            return False
        asking.leaves_some = True
        self._to_give_back.add(quota)
        if asking.returns:
            self.wake.set()
        return True

    def to_give_back(self) -> list[str]:
        """Of these quotas nobody takes anything now. Told once."""
        found = []
        for quota in list(self._to_give_back):
            want = self._wants.find(quota)
            if want is None or want.asking is None or not want.asking.leaves_some:
                self._to_give_back.discard(quota)
            elif want.asking.returns:
                want.asking.leaves_some = False
                found.append(quota)
                self._to_give_back.discard(quota)
        return found

    def central(self) -> list[str]:
        """Return quotas to give back in full at shutdown."""
        return list(self._wants.central)

    def cut_off(self) -> None:
        """The coordinator does not answer: nobody waits for it until it does."""
        self._is_cut_off = True
        is_lost = self.contact.is_lost(self._clock.monotonic_ms())
        for want in list(self._wants.waiting.values()):
            if want.asking is not None:
                want.asking.tell_all(Answer.CUT_OFF)
            elif is_lost:
                self._tell(want)

    def reached(self) -> None:
        """Again: who lost hope for want of an answer asks at once, and not when its pause is over."""
        if self._is_cut_off:
            self._is_cut_off = False
            self.hint(None)

    # --- asked and told by the conversation ---------------------------------------------------------------------------

    def due(self, most: int = MOST_DUE) -> list[str]:
        """Quotas to ask for now, those that have been due for longest first."""
        return [want.quota for want in self._wants.due(self._clock.monotonic_ms(), most)]

    def next_due_in_ms(self) -> int | None:
        first_ms = self._wants.first_due_ms()
        return None if first_ms is None else max(0, first_ms - self._clock.monotonic_ms())

    def want_of(self, quota: str) -> LeaseWant:
        want = self._want(quota)
        if want.asking is not None:
            want.asking.send()
        demand_milli = want.demand.per_second_milli(self._clock.monotonic_ms())
        return LeaseWant(
            quota=quota,
            demand_milli=demand_milli,
            waiting=min(want.waiting, MAX_UNITS),
            held=min(want.held, MAX_UNITS),
        )

    def held(self, quota: str, units: int) -> None:
        """So many are, as the store says: it is looked at again after a while, for what runs out is to be reported."""
        want = self._want(quota)
        want.held, want.look_at_ms = units, self._clock.monotonic_ms() + self.look_at_held_ms
        self._wants.changed(want)

    def leased(self, quota: str, renew_at_ms: int | None) -> None:
        """There is a lease: it is renewed in time even if nobody uses it, for an expired one could not be spent."""
        want = self._want(quota)
        want.renew_at_ms = renew_at_ms
        self._wants.changed(want)

    def answered(self, asked: Iterable[str], reply: ExchangeReply, gained: Mapping[str, int]) -> None:
        """To what was asked for now, this is what may newly be spent, and what is said of the rest."""
        refused = {each.quota: LONGEST_PAUSE_MS for each in reply.refused if each.refusal not in HOPEFUL}
        current = current_leases(reply.leases)
        refused |= {lease.quota: lease.ends_in_ms for lease in current if lease.refusal not in HOPEFUL}
        why = {each.quota: each.refusal for each in current}
        why |= {each.quota: each.refusal for each in reply.refused}
        for quota in asked:
            if gained.get(quota, 0) == 0 and quota in refused:
                self.refused(quota, refused[quota], why[quota])
            else:
                self.granted(quota, gained.get(quota, 0))

    def keeps(self, quota: str) -> bool:
        """This agent renews the lease of it in time."""
        want = self._wants.find(quota)
        return want is not None and want.renew_at_ms is not None

    def granted(self, quota: str, units: int) -> None:
        """The lease is good again, with so many units more: whoever waits tries again."""
        want = self._want(quota)
        want.asked_at_ms = None
        if units > 0:
            want.backoff.succeeded()
            want.wanted, want.exhausted_until_ms, want.retry_at_ms = False, 0, 0
        else:
            # Nothing yet, but others hold some and are asked for it. Who waits goes on waiting, up to its own limit.
            want.wanted, want.exhausted_until_ms = want.waiting > 0, 0
            want.retry_at_ms = self._clock.monotonic_ms() + RETRY_MS
        self._tell(want, Answer.LOOK)

    def refused(
        self, quota: str, ends_in_ms: int = LONGEST_PAUSE_MS, why: GrantRefusal | None = GrantRefusal.EXHAUSTED
    ) -> None:
        """Nothing is left, and nothing will come back before the period ends: whoever waits is denied."""
        want, now_ms = self._want(quota), self._clock.monotonic_ms()
        want.wanted, want.exhausted_until_ms, want.renew_at_ms = False, now_ms + ends_in_ms, None
        want.look_at_ms, want.refusal = now_ms + self.look_at_held_ms, why
        want.back_off(now_ms, ends_in_ms)
        self._tell(want, Answer.LAST_LOOK)

    def refuse(self, quota: str, reason: str) -> None:
        """The coordinator refused it as it is: it is not asked for again for a while, and who waits is denied."""
        now_ms = self._clock.monotonic_ms()
        self.set_aside.add(quota, reason, now_ms)
        want = self._wants.find(quota)
        if want is not None:
            want.postponed_until_ms = now_ms + SET_ASIDE_MS
            self.refused(quota, SET_ASIDE_MS)

    def postpone(self, quota: str, for_ms: int) -> None:
        """Its lane pauses: it is asked for afterwards, and who waits goes on waiting."""
        want = self._want(quota)
        want.postponed_until_ms = self._clock.monotonic_ms() + for_ms
        self._wants.changed(want)

    def _is_set_aside(self, quota: str, now_ms: int) -> bool:
        return bool(self.set_aside) and self.set_aside.has(quota, now_ms)

    def cannot_ask(self, quota: str) -> None:
        """Its lane has stopped, so no exchange will ask for those who wait, either."""
        asking = self._want(quota).asking
        if asking is not None:
            asking.send()
        self.refused(quota, why=None)

    def hint(self, quota: str | None) -> None:
        """The coordinator says that units came free (or, without a quota, that limits changed): ask again at once."""
        if quota is None:
            self._hints += 1  # each want hears of it when it is looked at next
            for want in list(self._wants.waiting.values()):
                self._hear_hint(want)
                want.wanted = True
                self._wants.changed(want)
        elif (known := self._wants.find(quota)) is not None:
            self._hear_hint(known)
            # What has come for requests that wait no more is to go back.
            known.wanted = known.wanted or known.waiting > 0 or known.asking is not None
            self._wants.changed(known)
        self.wake.set()

    def _hear_hint(self, want: Want) -> None:
        want.hints = self._hints
        want.backoff.succeeded()
        want.exhausted_until_ms, want.retry_at_ms = 0, 0

    def fetch(self, quota: str) -> None:
        """People had units brought here: they are asked for, though nobody here has asked for any yet."""
        if self._is_set_aside(quota, self._clock.monotonic_ms()):
            return
        self._want(quota).wanted = True
        self.hint(quota)

    def outlook(self, quota: str) -> LeaseOutlook:
        """Return why there may be no units of a quota here."""
        want, now_ms = self._want(quota), self._clock.monotonic_ms()
        return LeaseOutlook(
            is_exhausted=want.refusal in USED_UP and now_ms < want.exhausted_until_ms,
            is_cut_off=self.contact.is_lost(now_ms),
            is_draining=self.contact.is_draining,
        )

    def demand_milli(self, quota: str) -> int:
        return self._want(quota).demand.per_second_milli(self._clock.monotonic_ms())

    def in_demand(self, most: int) -> list[str]:
        """Return allowances that have a lease here or lack one, those that are asked for most first."""
        found = [want for want in self._wants.recent() if want.wanted or want.renew_at_ms is not None]
        now_ms = self._clock.monotonic_ms()
        hottest = nlargest(most, found, key=lambda want: want.demand.per_second_milli(now_ms))
        return [want.quota for want in hottest if want.asking is None]

    def hottest(self, most: int) -> list[HotKey]:
        """What is asked for most, the most first, of rates and allowances alike."""
        now_ms = self._clock.monotonic_ms()
        demands = [(want.quota, want.demand) for want in self._wants.recent()]
        demands += islice(reversed(self._rates.items()), MOST_RECENT)
        measured = (HotKey(quota, demand.per_second_milli(now_ms)) for quota, demand in demands)
        return nlargest(most, (key for key in measured if key.demand_milli), key=attrgetter("demand_milli"))

    # --- within -------------------------------------------------------------------------------------------------------

    def _want(self, quota: str) -> Want:
        """Return what is followed of a quota. A new one is followed from now on, unless there are too many."""
        want = self._wants.find(quota)
        if want is not None:
            if want.hints != self._hints:
                self._hear_hint(want)
            return want
        want = Want(quota, Demand(self._clock.monotonic_ms()), hints=self._hints)
        want.asking = Asking() if self._is_central(quota) else None
        want.postponed_until_ms = self.set_aside.until_ms(quota)
        if self._wants.is_full:
            self._turn_away(quota)
        else:
            self._wants.follow(want)
        return want

    def _turn_away(self, quota: str) -> None:
        self.turned_away += 1
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._turned_away_again_ms:
            self._turned_away_again_ms = now_ms + SAY_AGAIN_MS
            log.error("too many allowances are in use; no lease is asked for new ones", quota=quota, most=MOST_FOLLOWED)

    def _ask(self, want: Want) -> None:
        if not want.wanted:
            want.asked_at_ms = self._clock.monotonic_ms()
        want.wanted = True
        self._wants.changed(want)
        self.wake.set()

    def _tell(self, want: Want, answer: Answer = Answer.LOOK) -> None:
        event, want.changed = want.changed, None
        if event is not None:
            event.set()
        if want.asking is not None:
            want.asking.tell(answer)
            want.wanted = want.asking.waits
            want.retry_at_ms = 0 if want.wanted else want.retry_at_ms
        self._wants.changed(want)


def current_leases(leases: Iterable[LeaseReply]) -> list[LeaseReply]:
    """Return each quota's lease of its current period; of a quota that was not asked for, all that have begun."""
    leases = list(leases)
    known = {lease.quota for lease in leases if lease.current}
    return [lease for lease in leases if lease.current or (lease.quota not in known and not lease.starts_in_ms)]
