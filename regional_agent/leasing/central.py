"""A central quota: nothing is granted ahead, so each request asks the coordinator for its own units, and waits.

Requests that ask while an exchange is under way form a batch, which the next exchange asks for. A request is answered
only by an exchange that asked for its units. Then it tries the store, where the units are. What the batch did not take
goes back at once: a caller that hung up, or stopped waiting, leaves units behind.
"""

import asyncio
from dataclasses import dataclass, field

from regional_agent.leasing.quota import MAY_RETRY, GrantAnswer, Quota
from regional_agent.store.types import PolicyDecision


@dataclass(slots=True)
class CentralBatch:
    """The requests that one exchange asks for."""

    members: int = 0
    answer: GrantAnswer = GrantAnswer.TIMED_OUT
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def reply(self, answer: GrantAnswer) -> None:
        self.answer = answer
        self.answered.set()


@dataclass(slots=True)
class CentralQueue:
    """All requests that wait for units of one quota."""

    gathering: CentralBatch = field(default_factory=CentralBatch)
    sent: list[CentralBatch] = field(default_factory=list)  # in an exchange that is under way, or was not answered
    retrying: int = 0  # requests that may try the store, and have not done so yet
    has_surplus: bool = False  # units that no request takes are to go back

    @property
    def has_unsent(self) -> bool:
        """Return whether a request waits that no exchange has asked for yet."""
        return self.gathering.members > 0

    @property
    def may_return(self) -> bool:
        return self.has_surplus and not self.retrying

    def send(self) -> None:
        """Close the batch: an exchange asks for all requests that wait, and no later one does."""
        if self.gathering.members:
            self.sent.append(self.gathering)
            self.gathering = CentralBatch()

    def reply(self, answer: GrantAnswer) -> None:
        """Answer the requests that the exchange asked for."""
        for each in self.sent:
            self.retrying += each.members if answer in MAY_RETRY else 0
            each.reply(answer)
        self.sent = []

    def reply_to_all(self, answer: GrantAnswer) -> None:
        self.send()
        self.reply(answer)

    async def wait(self, timeout_ms: int) -> GrantAnswer:
        """Wait for the exchange that asks for this request. A caller that may retry reports `finish_attempt`."""
        batch = self.gathering
        batch.members += 1
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await batch.answered.wait()
        except TimeoutError:
            if not batch.answered.is_set():
                batch.members -= 1
        return batch.answer

    def finish_attempt(self) -> None:
        self.retrying -= 1


@dataclass(slots=True, eq=False)
class CentralQuota(Quota):
    """A quota of which the coordinator grants no units ahead. The queue has the requests that wait."""

    queue: CentralQueue = field(default_factory=CentralQueue)

    @property
    def is_central(self) -> bool:
        return True

    def is_low(self, _decision: PolicyDecision, _now_ms: int, _round_trip_ms: int) -> bool:
        return False

    def begin_request(self) -> None:
        self.queue.send()

    def notify(self, answer: GrantAnswer) -> None:
        super(CentralQuota, self).notify(answer)
        self.queue.reply(answer)
        self.is_requested = self.queue.has_unsent
        self.retry_at_ms = 0 if self.is_requested else self.retry_at_ms

    def on_coordinator_lost(self, *, is_outage: bool) -> None:  # noqa: ARG002 - a leased quota uses it
        self.queue.reply_to_all(GrantAnswer.COORDINATOR_LOST)

    def on_mode_changed(self) -> None:
        self.queue.reply_to_all(GrantAnswer.RETRY)
