"""One agent, put together: its parts and the loops that run by themselves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import structlog
import tenacity

from protocol.blocks import BlockList
from protocol.clock import Clock
from protocol.messages import Versions
from protocol.policy import PolicyBundle
from regional_agent.admission import Admission
from regional_agent.blocks import Blocks
from regional_agent.booking import JournalBooking
from regional_agent.coordinator_client import CoordinatorClient
from regional_agent.domain.breaker import Breaker
from regional_agent.feeds import Feed
from regional_agent.hearing import SignalListener
from regional_agent.holds import Holds
from regional_agent.journal import Journal, JournalDirectory
from regional_agent.leasing import Leasing
from regional_agent.life import LifeKeeper
from regional_agent.metrics import Metrics
from regional_agent.policies import Policies, edges_ms
from regional_agent.reporting import FAILURES, Conversation
from regional_agent.settings import AgentSettings, journal_of
from regional_agent.slicing import Slicing
from regional_agent.store.connection import StoreConnection
from regional_agent.store.gathering import Gatherer
from regional_agent.store.guard import Guard
from regional_agent.store.scripts import Fenced, Scripts
from regional_agent.without_store import WithoutStore

log = structlog.get_logger()

LAST_WORDS_S = 6.0
RETRY_S = 0.2


class Region:
    def __init__(self, settings: AgentSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self.metrics = Metrics()
        store_url = settings.store_url.get_secret_value()
        self.store = StoreConnection(
            store_url,
            timeout_ms=settings.store_timeout_ms,
            decision_timeout_ms=settings.decision_timeout_ms,
            on_connected=self._doubt,
        )
        self.scripts = Scripts(self.store)
        token = settings.coordinator_token.get_secret_value()
        self._coordinator = CoordinatorClient(settings.coordinator_url, token, settings.region)
        breaker = Breaker(settings.breaker_failures, settings.breaker_pause_ms)
        self.guard = Guard(breaker, clock, self.metrics, self.scripts.probe, settings.breaker_pause_ms)
        self.life = LifeKeeper(self.store, self.scripts, self._coordinator, on_established=self.guard.answered)
        self.leasing = Leasing(clock)
        gatherer = Gatherer(self.scripts, self.guard)
        self.slicing = Slicing(gatherer, self.life, self.leasing, clock)
        self.journal = _journal(settings, clock, self.metrics)
        without_store = WithoutStore(self.journal, self.metrics, clock, settings.workers)
        self.admission = Admission(gatherer, self.life, self.leasing, self.slicing, without_store, self.metrics, clock)
        self.conversation = self._new_conversation(without_store)
        self.holds = Holds(self.scripts, self.life, self.metrics, self.conversation.look_back_again)
        self._signals = SignalListener(
            coordinator=self._coordinator,
            scripts=self.scripts,
            life=self.life,
            leasing=self.leasing,
            conversation=self.conversation,
        )
        self._policies = Feed(
            "policies",
            PolicyBundle,
            ask=self._coordinator.policies,
            put_in_force=self._put_policies_in_force,
            edges_ms=edges_ms,
            clock=clock,
            state_dir=settings.state_dir,
        )
        self._blocks = Feed(
            "blocks",
            BlockList,
            ask=self._coordinator.blocks,
            put_in_force=self._put_blocks_in_force,
            edges_ms=lambda _: (),  # each ends by the clock when it is looked at
            clock=clock,
            state_dir=settings.state_dir,
        )
        self.conversation.heard_of = self._hear_of

    def _new_conversation(self, without_store: WithoutStore) -> Conversation:
        allowances = without_store.allowances
        return Conversation(
            scripts=self.scripts,
            coordinator=self._coordinator,
            leasing=self.leasing,
            life=self.life,
            journal=JournalBooking(self.journal, allowances, self._coordinator, self.scripts, self.guard, self._clock),
            metrics=self.metrics,
            clock=self._clock,
            interval_ms=self.settings.report_interval_ms,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From the first connection to the last words."""
        self.journal.recover()
        self.store.keep()
        parts: list[Part] = [self.life, self.conversation, self._signals, self._policies, self._blocks]
        loops = [asyncio.create_task(_forever(part), name=type(part).__name__) for part in parts]
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await self.admission.close()
            self.slicing.close()
            self.guard.close()
            await self._last_words()
            await self._coordinator.close()
            await self.store.close()

    async def _last_words(self) -> None:
        """Report what was spent and, where told to, return the rest: tried again until it is done or time is up."""
        finish = tenacity.retry(
            retry=tenacity.retry_if_exception_type((*FAILURES, Fenced)),
            wait=tenacity.wait_fixed(RETRY_S),
            sleep=asyncio.sleep,
        )(self.conversation.finish)
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await finish(return_unspent=self.settings.return_on_stop)
        except TimeoutError:
            log.error("leaving without having reported everything; it stays in the store")

    def _doubt(self) -> None:
        self.life.doubt()

    def _put_policies_in_force(self, bundle: PolicyBundle, age_ms: int) -> None:
        self.admission.policies = Policies(bundle, age_ms)
        self.slicing.give_back_all()
        self.leasing.hint(None)  # a limit may have been raised
        self._note_versions()

    def _put_blocks_in_force(self, listed: BlockList, age_ms: int) -> None:
        self.admission.blocks = Blocks(listed, self._clock.monotonic_ms() - age_ms)
        self._note_versions()

    def _note_versions(self) -> None:
        policies, blocks = self.admission.policies, self.admission.blocks
        self.conversation.versions = Versions(
            policies=policies.version if policies else 0, blocks=blocks.version if blocks else 0
        )

    def _hear_of(self, versions: Versions) -> None:
        self._policies.heard_of(versions.policies)
        self._blocks.heard_of(versions.blocks)

    def unreported_age_ms(self) -> int:
        return max(0, self._clock.monotonic_ms() - self.conversation.reported_at_ms)

    def measure(self) -> None:
        """Set the gauges that are looked up rather than counted."""
        life, policies = self.life.current, self.admission.policies
        self.metrics.epochs.current.set(life.epoch if life else 0)
        self.metrics.epochs.refused(self.life.refused)
        self.metrics.policy_version.set(policies.version if policies else 0)
        self.metrics.block_version.set(self.admission.blocks.version if self.admission.blocks else 0)
        self.metrics.unreported_seconds.set(self.unreported_age_ms() / 1000)
        self.metrics.store_calls.set(self.store.calls)
        self.metrics.breaker.state(self.guard.state)
        self.metrics.degraded_seconds.set(self.guard.degraded_ms() / 1000)


def _journal(settings: AgentSettings, clock: Clock, metrics: Metrics) -> Journal:
    path = journal_of(settings)
    disk = JournalDirectory(path) if path is not None else None
    limits = {"most_bytes": settings.journal_max_bytes, "most_ms": settings.journal_max_ms}
    return Journal(disk, clock, metrics.journal, **limits)


class Part(Protocol):
    async def run(self) -> None:
        """Runs until cancelled."""


async def _forever(part: Part) -> None:
    """An error that nobody foresaw is loud, and does not leave the agent half deaf: the loop begins again."""
    while True:
        try:
            await part.run()
        except Exception:
            log.exception("a loop of the agent failed", loop=type(part).__name__)
        await asyncio.sleep(RETRY_S)
