"""Encode what the recorder noted, and send it to the coordinator in batches.

A batch is encoded once and sent until the coordinator has stored it, so that it is stored once. While the coordinator
does not take any, at most `most_bytes` of compressed batches wait; then the oldest is dropped and counted as lost.
"""

import asyncio
import gzip
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import structlog

from protocol.backoff import Backoff
from protocol.check import CheckAnswer, cause_of_denial
from protocol.clock import Clock
from protocol.decision_log.messages import (
    MAX_DECISIONS,
    MAX_LOGGED_POLICIES,
    DecisionBatch,
    DecisionsLost,
    LoggedDecision,
    LoggedPolicy,
    Outcome,
)
from regional_agent.admission.plan import CheckPlan
from regional_agent.admission.policies import Policies
from regional_agent.decision_log.losses import DecisionLogMetrics, Losses, epoch_ms
from regional_agent.decision_log.recorder import DecisionRecorder, Entry
from regional_agent.leasing.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnavailable

log = structlog.get_logger()

ENCODE_EVERY_S = 0.25
ROWS_PER_TURN = 50  # encoded in one turn of the event loop: half a millisecond
SEND_EVERY_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0
CLOSE_WITHIN_S = 2.0
FASTEST = 1  # of gzip's levels: it makes a batch ten times smaller


class EncodedBatch(NamedTuple):
    """A batch as it is sent, and what is lost with it if it is dropped."""

    body: bytes
    decisions: tuple[tuple[int, int], ...]  # the time of each row, and how many decisions it stands for
    losses: list[DecisionsLost]


class DecisionSender:
    def __init__(
        self,
        recorder: DecisionRecorder,
        losses: Losses,
        coordinator: CoordinatorClient,
        clock: Clock,
        agent: str,
        policies: Callable[[], Policies | None],
        most_bytes: int,
    ) -> None:
        self._recorder = recorder
        self._losses = losses
        self._coordinator = coordinator
        self._clock = clock
        self._agent = agent
        self._policies = policies
        self._most_bytes = most_bytes
        self._rows: list[LoggedDecision] = []  # encoded next
        self._batches: deque[EncodedBatch] = deque()
        self._bytes = 0  # of the batches
        self._backoff_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    @property
    def _metrics(self) -> DecisionLogMetrics:
        return self._losses.metrics

    async def run(self) -> None:
        """Collect and send until cancelled. Collecting goes on while a batch is under way."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._collect_for_ever())
            tasks.create_task(self._send_for_ever())

    async def close(self) -> None:
        """Send what is left, once, within CLOSE_WITHIN_S."""
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._collect(closing=True)
                await self._pack()
                while self._batches:
                    await self._send_first()
        except (TimeoutError, CoordinatorUnavailable, CoordinatorRefused) as error:
            left = sum(count for batch in self._batches for _, count in batch.decisions)
            log.warning("decision log lost", reason=str(error) or type(error).__name__, decisions=left)

    # --- collecting ---------------------------------------------------------------------------------------------------

    async def _collect_for_ever(self) -> None:
        while True:
            await asyncio.sleep(ENCODE_EVERY_S)
            await self._collect()

    async def _collect(self, *, closing: bool = False) -> None:
        """Make rows of what was noted, a few in each turn of the event loop."""
        while entries := self._recorder.take(ROWS_PER_TURN, closing=closing):
            policies, now_ms, ahead_ms = self._policies(), self._clock.monotonic_ms(), epoch_ms(self._clock.now())
            self._rows += [row_of(each, policies, ahead_ms - now_ms) for each in entries]
            if len(self._rows) >= MAX_DECISIONS:
                await self._pack()
            await asyncio.sleep(0)

    async def _pack(self) -> None:
        """Make batches of all rows and losses. Compression has a thread: it would hold decisions up."""
        while (losses := self._losses.take()) or self._rows:
            rows, self._rows = self._rows[:MAX_DECISIONS], self._rows[MAX_DECISIONS:]
            batch = DecisionBatch(id=secrets.token_hex(12), agent=self._agent, decisions=rows, lost=losses)
            body = await asyncio.to_thread(gzip.compress, msgspec.json.encode(batch), FASTEST)
            self._batches.append(EncodedBatch(body, tuple((each.at_ms, each.count) for each in rows), losses))
            self._bytes += len(body)
        while self._bytes > self._most_bytes:
            self._drop_first("overflow")
        self._metrics.waiting_bytes.set(self._bytes)

    def _drop_first(self, reason: str) -> None:
        batch = self._take_first()
        self._losses.add_undelivered(batch.decisions, reason)
        self._losses.put_back(batch.losses)

    def _take_first(self) -> EncodedBatch:
        batch = self._batches.popleft()
        self._bytes -= len(batch.body)
        self._metrics.waiting_bytes.set(self._bytes)
        return batch

    # --- sending ------------------------------------------------------------------------------------------------------

    async def _send_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._backoff_s.pause or SEND_EVERY_S)
            await self._pack()
            try:
                while self._batches:
                    await self._send_first()
                self._backoff_s.succeeded()
            except CoordinatorUnavailable as error:
                self._note_failure(str(error))
            except CoordinatorRefused as refused:
                self._drop_first("refused")
                self._note_failure(str(refused))

    def _note_failure(self, reason: str) -> None:
        if not self._backoff_s.pause:
            log.warning("decision log is not taken", reason=reason)
        self._backoff_s.failed(0)

    async def _send_first(self) -> None:
        """Send the oldest batch. It may be dropped meanwhile, to make room for newer ones."""
        batch = self._batches[0]
        stored = await self._coordinator.log_decisions(batch.body)
        self._metrics.sent.inc(stored.stored)
        if self._batches and self._batches[0] is batch:
            self._take_first()
        if stored.refused:
            self._losses.add(stored.refused, "refused")


def row_of(entry: Entry, policies: Policies | None, epoch_ahead_ms: int) -> LoggedDecision:
    """Return the row of an entry. `epoch_ahead_ms` turns the agent's monotonic time into the time of day."""
    plan, answer, outcome = entry.plan, entry.answer, entry.outcome
    subject = plan.subject if policies is None else policies.normalize(plan.subject)
    if not all(map(str.isprintable, subject.values())):
        subject = {field: _printable(value) for field, value in subject.items()}
    operation = plan.request.operation
    denying = _denying_policy(answer, outcome)
    return LoggedDecision(
        at_ms=entry.at_ms + epoch_ahead_ms,
        outcome=outcome,
        mode=plan.request.mode,
        subject=subject,
        policies=list(_logged_policies(plan, answer)),
        policy=denying,
        reason=_reason(answer, outcome),
        retry_after_ms=answer.retry_after_ms if outcome == "denied" else None,
        degraded=answer.degraded,
        epoch=entry.epoch,
        latency_us=entry.latency_us,
        operation=None if operation is None else operation.digest,
        weight=entry.weight,
        count=entry.count,
        last_ms=None if entry.count == 1 else entry.last_ms + epoch_ahead_ms,
    )


def _printable(text: str) -> str:
    """Replace what no database stores or what is no Unicode: the in-process engine decides such subjects, too."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def _logged_policies(plan: CheckPlan, answer: CheckAnswer) -> Iterable[LoggedPolicy]:
    """Yield what each policy answered that counts something, with the key and the cost that it charged."""
    charges = {each.policy.name: each.charge for each in plan.policy_charges}
    for each in answer.policies[:MAX_LOGGED_POLICIES]:
        charge = charges.get(each.policy)
        if charge is not None:
            yield LoggedPolicy(
                policy=each.policy,
                quota=charge.quota,
                cost=charge.cost,
                limit=each.limit,
                share=each.share,
                remaining=each.remaining,
                reason=each.reason,
                shadow=each.shadow,
            )


def _denying_policy(answer: CheckAnswer, outcome: Outcome) -> str | None:
    if outcome != "shadow_denied":
        return answer.denied_by
    return next((each.policy for each in answer.policies if each.shadow and not each.allowed), None)


def _reason(answer: CheckAnswer, outcome: Outcome) -> str | None:
    if outcome == "shadow_denied":
        return next((each.reason for each in answer.policies if each.shadow and not each.allowed), None)
    if outcome == "admitted":
        return None
    if answer.blocked_by is not None:
        return "blocked"
    return cause_of_denial(answer) or ("unmatched" if answer.unmatched == "deny" else None)
