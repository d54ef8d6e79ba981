"""Requests of a quota of which nothing is leased ahead: each asks the coordinator for its own units, and waits.

Whoever asks while an exchange is under way asks together in the next one. A request is told only by an exchange that
asked for its units; then it looks into the store, where they are. What nobody took by the time that all have looked
goes back at once: who hung up, or was not patient enough, leaves units behind.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum


class Answer(StrEnum):
    LOOK = "look"  # there may be units; who finds none may ask again
    LAST_LOOK = "last_look"  # this is all that there was
    CUT_OFF = "cut_off"  # the coordinator cannot be asked
    TIMED_OUT = "timed_out"


MAY_LOOK = (Answer.LOOK, Answer.LAST_LOOK)


@dataclass(slots=True)
class Round:
    """Those who ask in one exchange."""

    members: int = 0
    answer: Answer = Answer.TIMED_OUT
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, answer: Answer) -> None:
        self.answer = answer
        self.told.set()


@dataclass(slots=True)
class Asking:
    """All that is asked of one quota."""

    gathering: Round = field(default_factory=Round)
    sent: list[Round] = field(default_factory=list)  # of an exchange that is under way, or was not answered
    taking: int = 0  # requests that were told that they may look, and have not done so yet
    leaves_some: bool = False  # what they do not take is to go back

    @property
    def waits(self) -> bool:
        """Somebody asks whom no exchange has asked for yet."""
        return self.gathering.members > 0

    @property
    def returns(self) -> bool:
        return self.leaves_some and not self.taking

    def send(self) -> None:
        """An exchange asks for all who wait, and no later one."""
        if self.gathering.members:
            self.sent.append(self.gathering)
            self.gathering = Round()

    def tell(self, answer: Answer) -> None:
        """Those whom the exchange asked for."""
        for each in self.sent:
            self.taking += each.members if answer in MAY_LOOK else 0
            each.tell(answer)
        self.sent = []

    def tell_all(self, answer: Answer) -> None:
        self.send()
        self.tell(answer)

    async def ask(self, timeout_ms: int) -> Answer:
        """What the exchange says that asks for it. Whoever may look says `looked` afterwards."""
        of = self.gathering
        of.members += 1
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await of.told.wait()
        except TimeoutError:
            if not of.told.is_set():
                of.members -= 1
        return of.answer

    def looked(self) -> None:
        self.taking -= 1
