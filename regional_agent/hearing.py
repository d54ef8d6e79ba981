"""What the agent hears without asking: hints from the coordinator, and new policies.

A hint never carries truth. One that is lost costs time, for the next exchange says the same.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from protocol.messages import Signal
from protocol.policy import PolicyBundle
from regional_agent.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable
from regional_agent.leasing import Leasing
from regional_agent.life import LifeKeeper
from regional_agent.policies import Policies
from regional_agent.reporting import Conversation
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.scripts import Fenced, Scripts

log = structlog.get_logger()

PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0


class SignalListener:
    def __init__(
        self,
        *,
        coordinator: CoordinatorClient,
        scripts: Scripts,
        life: LifeKeeper,
        leasing: Leasing,
        conversation: Conversation,
    ) -> None:
        self._coordinator = coordinator
        self._scripts = scripts
        self._life = life
        self._leasing = leasing
        self._conversation = conversation

    async def run(self) -> None:
        while True:
            try:
                async for signal in self._coordinator.signals():
                    await self._heed(signal)
            except (CoordinatorUnavailable, CoordinatorRefused) as error:
                log.warning("signals are silent", reason=str(error))
            await asyncio.sleep(PAUSE_S)

    async def _heed(self, signal: Signal) -> None:
        if signal.kind == "recall" and signal.quota is not None:
            await self._give_back(signal.quota, signal.keep)
        elif signal.kind == "grant":
            self._leasing.hint(signal.quota)
        elif signal.kind == "policies":
            self._leasing.hint(None)  # a limit may have been raised

    async def _give_back(self, quota: str, keep: int) -> None:
        """A recall is always answered, even where there is nothing to give: what was spent is booked at once."""
        life = self._life.current
        if life is None:
            return
        try:
            await self._scripts.give_back(life, quota, keep)
        except Fenced:
            self._life.doubt()
        except (StoreUnavailable, StoreError) as error:
            log.warning("a recall could not be answered", quota=quota, reason=str(error))
        self._conversation.report_now()


class PolicyFeed:
    """Keeps the newest policies, and the last known ones on disk: an agent starts without the coordinator."""

    def __init__(
        self, coordinator: CoordinatorClient, state_dir: Path | None, on_change: Callable[[Policies], None]
    ) -> None:
        self._coordinator = coordinator
        self._file = None if state_dir is None else state_dir / "policies.json"
        self._on_change = on_change
        self._version: int | None = None

    async def run(self) -> None:
        self._load()
        pause_s = PAUSE_S
        while True:
            try:
                bundle = await self._coordinator.policies(self._version)
                pause_s = PAUSE_S
                if bundle is not None:
                    self._install(bundle)
                    self._save(bundle)
            except (CoordinatorUnavailable, CoordinatorRefused) as error:
                log.warning("no news of policies", reason=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _install(self, bundle: PolicyBundle) -> None:
        self._on_change(Policies(bundle))
        self._version = bundle.version
        log.info("policies in force", version=bundle.version)

    def _load(self) -> None:
        if self._file is None or not self._file.exists():
            return
        try:
            bundle = msgspec.json.decode(self._file.read_bytes(), type=PolicyBundle)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the last known policies cannot be read", reason=str(error))
            return
        self._install(bundle)
        self._version = None  # they may be old: the coordinator's first answer replaces them

    def _save(self, bundle: PolicyBundle) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(".new")
            draft.write_bytes(msgspec.json.encode(bundle))
            os.replace(draft, self._file)
        except OSError as error:
            log.warning("the policies cannot be kept on disk", reason=str(error))
