"""The whole simulated system: coordinators, regions, agents, services that send requests, and the faults.

The agents are real (`regional_agent.agent.Region` with its loops and its shutdown) on virtual wires.
"""

import asyncio
import contextlib
import itertools
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from unittest.mock import patch
from uuid import UUID

import msgspec
import structlog
from pydantic import SecretStr

from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.rules.settlement import EpochState
from coordinator.limits.rules.validation import faults_of
from protocol.check import NO_COSTS, Check, CheckAnswer, Hold, HoldCommit, Subject
from protocol.identifiers import subject_key
from protocol.lease import LeaseState
from protocol.limits.document import LimitsDocument, Mode
from protocol.limits.subjects import InvalidSubjectValue
from protocol.messages import OpenEpoch
from regional_agent import agent as region_module
from regional_agent.admission.engine import NoPoliciesYet
from regional_agent.admission.rules import hold_ids
from regional_agent.admission.rules.ceilings import AboveCeiling
from regional_agent.agent import RegionalAgent
from regional_agent.leasing import epoch as epoch_module
from regional_agent.settings import AgentSettings
from regional_agent.store.opening import Server
from tests.simulation.checks.limits import Limits
from tests.simulation.checks.region_settings import Divided
from tests.simulation.faults import LEDGER_LOSSES, REGIONS, Event
from tests.simulation.simulated import operators
from tests.simulation.simulated.disks import VirtualDirectory, VirtualDisk
from tests.simulation.simulated.ledger_model import Adjustment, Epoch, LedgerModel, Name, Transaction
from tests.simulation.simulated.network import TRANSACTION_S, Coordinators, VirtualClient, Weather
from tests.simulation.simulated.scripted_store import Replica
from tests.simulation.simulated.stores import Admission, Machine, VirtualConnection
from tests.simulation.simulated.virtual_time import VirtualClock, VirtualLoop
from web.problems import Problem

TERMS = LeaseTerms(lease_ms=4_000)
LANES = 2
LINES_OF_A_BATCH = 3  # so few that reports are made in pieces
ROUTES = ("/exports", "/mails", "/both")
TRIES = (  # of a quota whose regions have their base shares alone
    {"limit": "6 per 2 seconds, burst 12", "algorithm": "token_bucket"},
    {"limit": "0.5/second, burst 9", "algorithm": "gcra"},
    {"limit": "9 per 3 seconds", "algorithm": "sliding_log"},
    {"limit": "12 per 2 seconds", "algorithm": "fixed_window"},
    {"limit": "3/week, burst 9", "algorithm": "token_bucket"},
)
MODELS = (None, {"model": "small"}, {"model": "large"}, {"model": "large", "team": "red"})
QUOTA_OF = {"/exports": "exports", "/mails": "mails", "/both": "mails"}  # one of them
RECALLED_EVERY_S = 30
CUT_OFF_US = 5_000_000
COSTS_DIFFER = 3  # a check of this cost names another one for the mails
BY_QUOTA = 2  # a hold, or a commit, of so many units is made by quota
ReportName = tuple[int, int, int]  # epoch, lane, seq


CARRIED_OVER = (None, "all", "50%", 30, None)  # of the exports
ABSURD = 2**53 - 2  # units of one adjustment
REPORT_WITHIN = ("auto", "1s", "7s", "1h")  # of the exports
OVERDRAFT = 11  # of the exports, where there is one


TRY = Subject(tenant="acme", route="/tries", method="GET")


class Modes(NamedTuple):
    """The modes of a run's allowances."""

    exports: Mode = Mode.LEASED
    mails: Mode = Mode.LEASED

    @classmethod
    def of(cls, number: int) -> "Modes":
        """Return one of six mixes of modes. A quota with a soft cap has one limit for all regions."""
        return cls(tuple(Mode)[number % 3], (Mode.LEASED, Mode.CENTRAL)[number // 3 % 2])


def _on_store_failure(mode: Mode, unless_central: str) -> str:
    return "closed" if mode is Mode.CENTRAL else unless_central


class Calendars(NamedTuple):
    """The calendars of a run's allowances."""

    exports: str = "hour"
    mails_zone: str = "UTC"


ALL_LEASED = Modes()
USUAL = Calendars()


def document(
    limit: int, modes: Modes = ALL_LEASED, calendars: Calendars = USUAL, *, has_labels: bool = False
) -> LimitsDocument:
    cap: object = {"overdraft": OVERDRAFT} if limit % 2 and modes.exports is Mode.LEASED else "hard"
    carried = None if modes.exports is Mode.REGIONAL else CARRIED_OVER[limit % len(CARRIED_OVER)]
    horizon = "auto" if modes.exports is Mode.CENTRAL else "2s"
    quotas = [
        {"name": "exports", "kind": "allowance", "limit": limit, "period": calendars.exports, "horizon": horizon}
        | {"mode": modes.exports, "cap": cap, "report_within": REPORT_WITHIN[limit % len(REPORT_WITHIN)]}
        | ({"carry_over": carried} if carried else {}),
        {"name": "mails", "kind": "allowance", "limit": 40 + limit // 2, "period": "day", "cap": {"overage": 15}}
        | {"mode": modes.mails, "time_zone": calendars.mails_zone},
        {"name": "api", "kind": "rate", "limit": "60/second, burst 90"},
        {"name": "tries", "kind": "rate", "sharing": "regional"} | TRIES[limit % len(TRIES)],
    ]
    policies = [
        {
            "name": "export",
            "quota": "exports",
            "by": ["tenant"],
            "match": {"route": "/exports"},
            "on_store_failure": _on_store_failure(modes.exports, "local"),
            "usage_by": ["labels.model"] if has_labels else [],
        },
        {
            "name": "mail",
            "on_hold_expiry": "charge",
            "quota": "mails",
            "by": ["tenant"],
            "match": {"route": "/mails"},
            "on_store_failure": _on_store_failure(modes.mails, "open"),
        },
        {"name": "export-too", "quota": "exports", "by": ["tenant"], "match": {"route": "/both"}},
        {"name": "mail-too", "quota": "mails", "by": ["tenant"], "match": {"route": "/both"}},
        {"name": "calls", "quota": "api", "by": ["tenant"], "match": {"route": "/both"}},
        {"name": "try", "quota": "tries", "by": ["tenant"], "match": {"route": "/tries"}},
    ]
    found = msgspec.convert({"quotas": quotas, "policies": policies}, LimitsDocument)
    assert not faults_of(found)
    return found


@dataclass
class Truth:
    """A record of what really happened, kept outside of the system."""

    admitted: dict[tuple[int, str, str], int] = field(default_factory=lambda: defaultdict(int))
    enforced: dict[tuple[int, str, str], int] = field(default_factory=lambda: defaultdict(int))
    total: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))  # enforced, by quota and period
    labelled: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # by region, quota, period, labels
    heard: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # what services were told
    executed: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by quota
    checked: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))  # by region and quota
    answered: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))  # of these, to services
    heard_labelled: Counter[tuple[str, str]] = field(default_factory=Counter)  # told at all, by quota and labels
    heard_without: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # told without the store, by quota


@dataclass
class Denials:
    """Consecutive denials of one quota in one region, in seconds of the run."""

    first_asked_s: float
    last_asked_s: float
    by: str  # the agent that denied the last


@dataclass
class Agent:
    name: str
    region: str
    is_alive: bool = True
    calls_left: int | None = None  # it is killed when there are none left
    real: Any = None
    task: Any = None
    client: Any = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


class World:
    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.seed = seed
        self.loop = loop
        self.random = self.chance("world")
        start_s = self.random.choice([3590, 3580, 3595, 1800])  # often shortly before the hour ends
        day = datetime(2026, 11, 18, 9, tzinfo=UTC).timestamp()
        self.clock = VirtualClock(loop, datetime.fromtimestamp(day + start_s, UTC))
        self.truth = Truth()
        self.bugs: list[str] = []
        self.ledger = LedgerModel(LANES)
        self.divided = Divided(self.ledger, self.clock)
        self.limits = Limits(self.ledger, self.clock)
        self.ledger.on_write = self._written
        self.coordinators = Coordinators(self.ledger, self.clock, TERMS, self._bug)
        self.machines = {name: self._machine(name) for name in REGIONS}
        self.weather = {name: Weather(self.chance(f"weather {name}")) for name in REGIONS}
        self.disks = {name: VirtualDisk(self.chance(f"disk {name}")) for name in REGIONS}
        self.agents: list[Agent] = []
        self.demand = dict.fromkeys(REGIONS, 0)
        self.lost_regions: set[str] = set()
        self.lossy_regions: set[str] = set()  # whose store lost data
        # What stores forgot in a way that nobody can see: region, quota, and the period that it was of.
        self.unseen: set[tuple[str, str, str]] = set()
        self.denials: dict[tuple[str, str], Denials] = {}  # by region and quota, since the last admission
        self.ledger_lost = 0  # so many times
        self.answers = self.chance("answers")  # to people: whether they arrive
        self.approved: dict[UUID, Adjustment] = {}  # adjustments, as who approved them was answered
        self.days_passed = False  # so many that what is late by then waits for people
        self.rebased: set[tuple[int, int, int]] = set()  # lanes that people let go on: epoch, lane, seq
        self.told_and_lost: dict[str, set[ReportName]] = {}  # regions have receipts for these, and the ledger has not
        self.admissions: deque[Admission] = deque()  # since the last look
        self.late_admissions: list[str] = []
        self.late_units: dict[tuple[int, str, str], int] = defaultdict(int)
        self.overdrawn_while_heard: list[str] = []
        self.step = 0
        self.limit = 0
        self.modes, self.calendars = ALL_LEASED, USUAL
        self.has_labels = self.chance("labels").random() < 1 / 3  # exports are booked with a label
        self.until: dict[int, list[Any]] = defaultdict(list)
        self.snapshots: dict[tuple[str, int], Any] = {}
        self._names = 0
        self._services: set[Any] = set()
        self.unreported_after_stop: list[str] = []
        self.resolved: set[tuple[int, Key]] = set()  # leases of whose suspense or quarantine people approved the end
        self.forgotten_holds: list[str] = []  # of which a service told something, and the store had not lost data

    def chance(self, what: str) -> random.Random:
        """Return a random stream for one use, so that another draw here changes nothing elsewhere."""
        return random.Random(f"{self.seed} {what}")

    def _machine(self, name: str) -> Machine:
        machine = Machine(name, self.clock, self.chance(f"machine {name}"), self._admitted)
        machine.note_work = self._worked
        machine.store.note_overdrawn = lambda lease, _period, units: self._overdrew(machine, lease, units)
        machine.drift_ppm = self.random.choice([0, 0, 20_000, -20_000])
        machine.store.is_exempt = self.random.random() < 0.5
        if not machine.store.is_exempt and self.chance(f"replica of {name}").random() < 0.5:
            machine.link_replica()
        return machine

    def _written(self, transaction: Transaction, before: Mapping[Name, Any]) -> None:
        self.divided.look(transaction, before)
        self.limits.look(transaction, before)

    def _bug(self, what: str, error: BaseException) -> None:
        self.bugs.append(f"{what}: {type(error).__name__}: {error}")

    def note_unhandled(self, about: dict[str, Any]) -> None:
        """Note what the loop could only report, above all errors of the simulation itself."""
        if error := about.get("exception"):
            self._bug(str(about.get("message")), error)

    def _admitted(self, admission: Admission) -> None:
        self._worked(admission)
        self.truth.checked[admission.region, admission.quota] += admission.units
        if admission.units < 0:
            return  # it was not admitted after all
        self.admissions.append(admission)
        self._is_in_time(admission)

    def _overdrew(self, machine: Machine, lease: str, units: int) -> None:
        """Note an overdraft. An agent with a reply within the last five seconds is not disconnected."""
        heard_at_us, now_us = machine.store.heard_at_us, machine.store.now_us
        self.coordinators.outcomes["overdrawn"] += units
        if self.is_unseen(machine.region):
            return  # a store that goes back in the same incarnation has forgotten who was heard
        if not machine.jumped_back and heard_at_us is not None and 0 <= now_us - heard_at_us < CUT_OFF_US:
            self.overdrawn_while_heard.append(f"{units} of {lease}, {now_us - heard_at_us} us after an answer")

    def is_unseen(self, region: str | None, quota: str | None = None, period: str | None = None) -> bool:
        """Return whether a store lost something of these keys unnoticed; of any key for None."""
        about = region, quota, period
        return any(
            all(told is None or told == name for told, name in zip(about, each, strict=True)) for each in self.unseen
        )

    def note_unseen(self, region: str, *kept: tuple[str, Any], kinds: Sequence[str] = (":lease:", ":usage:")) -> None:
        """Note that a store loses these keys with their contents: all periods that they name."""
        self.unseen |= {
            (region, key.split(":", 4)[4], period)
            for key, value in kept
            if any(kind in key for kind in kinds)
            for period in _periods_in(key, value)
        }

    def _worked(self, admission: Admission) -> None:
        """Note the outcome of a hold, which may come after its lease, its period and its epoch."""
        region, epoch, quota, period, units, enforced, labels = admission
        self.truth.admitted[epoch, quota, period] += units
        self.truth.labelled[region, quota, period, labels] += units
        self.truth.executed[quota] += units
        if enforced:
            self.truth.enforced[epoch, quota, period] += units
            self.truth.total[quota, period] += units

    def _is_in_time(self, admission: Admission) -> None:
        """Check the time of an admission. A replaced epoch spends until it learns of it; that usage is in suspense."""
        machine = self.machines[admission.region]
        lease = self.ledger.leases.get((admission.epoch, Key(admission.quota, admission.period)))
        if lease is None or not admission.enforced or machine.jumped_back:
            return
        if self.is_unseen(admission.region, admission.quota, admission.period):
            return
        if lease.state in (LeaseState.ACTIVE, LeaseState.EXPIRED) and self.clock.now() > lease.expires_at:
            name = (admission.epoch, admission.quota, admission.period)
            self.late_units[name] += admission.units
            if self.late_units[name] <= lease.overdraft + lease.overdrawn:
                return  # it is cut off, and that is its overdraft
            self.late_admissions.append(f"{admission} after {lease.expires_at}, now {self.clock.now()}")

    # --- agents -------------------------------------------------------------------------------------------------------

    def start_agent(self, region: str) -> None:
        if region in self.lost_regions or len(self.alive(region)) >= 3:
            return
        self._names += 1
        agent = Agent(f"{region}-{self._names}", region)
        self.agents.append(agent)
        agent.task = self.loop.create_task(self._live(agent), name=agent.name)

    def alive(self, region: str) -> list[Agent]:
        return [agent for agent in self.agents if agent.region == region and agent.is_alive]

    async def _live(self, agent: Agent, return_on_stop: bool = False) -> None:
        settings = AgentSettings.model_construct(
            region=agent.region,
            coordinator_url="http://coordinator",
            coordinator_token=SecretStr(agent.name),
            store_url=SecretStr(f"redis://{agent.name}"),
            report_interval_ms=500,
            store_timeout_ms=250,
            decision_timeout_ms=250,
            return_on_stop=False,
            state_dir=None,
            journal_dir=agent.name,
            journal_max_bytes=2_000_000,
            journal_max_ms=900_000,
            name=agent.name,
            decision_log_rows_per_second=0,
            # An agent without the setting does as the others.
            store_confirm_in_replicas=self.machines[agent.region].store.replica is not None
            and self.chance(f"confirms {agent.name}").random() < 0.7,
        )
        agent.real = RegionalAgent(settings, self.clock)
        for cell in agent.real.cells:
            cell.scripts.max_lines = LINES_OF_A_BATCH
        async with agent.real.running():
            await agent.stopping.wait()

    def kill(self, agent: Agent) -> None:
        """Kill an agent: it sends and receives nothing more, and its clean-up has no effect."""
        if not agent.is_alive:
            return
        agent.is_alive = False
        if agent.client is not None:
            agent.client.leave()
        if agent.task is not None:
            agent.task.cancel()
        for task in asyncio.all_tasks(self.loop):
            if task.get_name().startswith(f"{agent.name}/"):
                task.cancel()

    async def stop(self, agent: Agent, *, return_unspent: bool) -> None:
        """Stop an agent as SIGTERM does, with its final report."""
        if not agent.is_alive or agent.real is None:
            return
        agent.real.settings = agent.real.settings.model_copy(update={"return_on_stop": return_unspent})
        alone = len(self.alive(agent.region)) == 1
        agent.stopping.set()
        before_s = self.loop.time()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([agent.task])
        said_all = self.loop.time() - before_s < 5.0 and agent.is_alive
        agent.is_alive = False
        if agent.client is not None:
            agent.client.leave()
        if said_all and alone and not self.alive(agent.region):
            self._nothing_is_unreported(agent)

    def _nothing_is_unreported(self, agent: Agent) -> None:
        incarnation, machine = agent.real.cells[0].epochs.current, self.machines[agent.region]
        stopped = agent.real.cells[0].exchange_loop.stopped_lanes
        if incarnation is None or stopped or not machine.is_up:
            return
        for key, value in machine.store.data.items():
            if f":to_report:{incarnation.epoch}" in key and value:
                self.unreported_after_stop.append(f"{agent.name} left {key} unreported")

    # --- services -----------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Send requests of services in every region, as often as its demand says."""
        chance, holding = self.chance("services"), self.chance("holds")
        due = dict.fromkeys(REGIONS, 0.0)
        while True:
            await asyncio.sleep(0.05)
            for region in REGIONS:
                due[region] += self.demand[region] * 0.05
                while due[region] >= 1:
                    due[region] -= 1
                    self.ask(region, chance)
                    if holding.random() < 0.1:
                        self.hold(region, holding)

    async def keep_books(self) -> None:
        """Run the background jobs of coordinators."""
        for second in itertools.count():
            await asyncio.sleep(1)
            if self.coordinators.is_up:
                self.coordinators.expire()
                try:
                    operators.rebase(self)
                    operators.continue_closing(self)
                    operators.follow_moves(self)
                    if second % RECALLED_EVERY_S == 0:
                        self.commit(self.ledger.recall_suspense(self.clock.now()))
                except Exception as error:
                    self._bug("a loop of a coordinator raised", error)

    def ask(self, region: str, chance: random.Random, mode: str = "enforce", cost: int | None = None) -> None:
        agents = [agent for agent in self.alive(region) if agent.real is not None and not agent.stopping.is_set()]
        if not agents:
            return
        agent = chance.choice(agents)
        route = chance.choice(ROUTES)
        cost = cost or chance.choice([1, 1, 2, 3, 8])
        self._serve(agent, self._ask(agent, route, cost, mode))

    def _serve(self, agent: Agent, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work, name=f"{agent.name}/request")
        self._services.add(task)
        task.add_done_callback(self._services.discard)

    def ask_for_many(self, region: str, tenants: int) -> None:
        """Send one request for each of many unknown tenants."""
        if agents := self._listening(region):
            for number in range(tenants):
                agent, route = agents[number % len(agents)], ROUTES[number % 2]
                self._serve(agent, self._ask(agent, route, 1, "enforce", f"tenant-{region}-{self.step}-{number}"))

    def ask_with_long_name(self, region: str, number: int) -> None:
        """Send a request with a tenant whose quota key would be too long; it is refused and has no effect."""
        if agents := self._listening(region):
            tenant = ("/" * 170, "é" * 100, "x" * 600, "a\tb")[number]
            self._serve(agents[0], self._ask(agents[0], ROUTES[0], 1, "enforce", tenant))

    def try_often(self, region: str, times: int) -> None:
        """Send so many requests to a rate of which each region has its own part, through all agents of the region."""
        if agents := self._listening(region):
            for number in range(times):
                agent = agents[number % len(agents)]
                self._serve(agent, self._try(agent, Check(subject=TRY, cost=1 + number % 2)))

    def refund(self, region: str, units: int) -> None:
        if agents := self._listening(region):
            self._serve(agents[0], self._try(agents[0], Check(subject=TRY, cost=units, mode="refund")))

    async def _try(self, agent: Agent, check: Check) -> None:
        try:
            answer = (await agent.real.admission.decide(check)).answer
        except NoPoliciesYet:
            return
        self.coordinators.outcomes["tried" if check.mode == "enforce" else "refunded"] += answer.allowed

    def change_limit_late(self, limit: int) -> None:
        """Raise the limit, and lower it after the next exchange has read it but before that has locked anything."""
        self.put_limits(limit + 100, self.modes)
        self.ledger.between_reads.append(lambda: self.put_limits(limit, self.modes))

    def hold(self, region: str, chance: random.Random) -> None:
        """Reserve units, and report the outcome later: to any agent, too late, twice or never."""
        agents = self._listening(region)
        if agents:
            agent = chance.choice(agents)
            self._serve(agent, self._hold(agent, random.Random(chance.random())))

    def _listening(self, region: str) -> list[Agent]:
        return [agent for agent in self.alive(region) if agent.real is not None and not agent.stopping.is_set()]

    async def _hold(self, agent: Agent, chance: random.Random) -> None:
        route, units = chance.choice(ROUTES), chance.choice([1, 2, 8])
        wanted = Hold(
            subject=Subject(tenant="acme", route=route, method="GET", labels=MODELS[units % len(MODELS)]),
            units=units,
            costs={"mails": 3} if units == BY_QUOTA else None,
            ttl_ms=chance.choice([300, 1_500, 4_000]),
            operation_id=str(chance.random()),
        )
        try:
            verdict = await agent.real.admission.hold(wanted)
        except NoPoliciesYet:
            return
        if verdict.hold is not None and verdict.answer.allowed:
            slept = self.clock.slept
            for _ in range(chance.choice([0, 1, 1, 2])):
                await asyncio.sleep(chance.choice([0.05, 0.5, 2.0, 6.0]))
                is_kept = slept == self.clock.slept  # else it may have been forgotten: it ended long ago
                hold_id, quota = agent.real.holds.seal.seal(verdict.hold.id), QUOTA_OF[route]
                await self._tell_hold(agent.region, hold_id, chance, is_kept, quota)

    async def _tell_hold(self, region: str, hold_id: str, chance: random.Random, is_kept: bool, quota: str) -> None:
        action, amount = chance.choice([("commit", 1), ("commit", 2), ("commit", 9), ("release", 0), ("extend", 1_000)])
        agents = self._listening(region)
        if agents:
            try:
                holds = chance.choice(agents).real.holds
                if action == "commit":  # by quota, or so much of each
                    by_quota = HoldCommit(costs={quota: amount})
                    await holds.commit(hold_id, by_quota if amount == BY_QUOTA else HoldCommit(units=amount))
                else:
                    await holds.update(hold_id, action, amount)
                self.coordinators.outcomes[f"hold {action}"] += 1
            except Problem as problem:  # it ended otherwise, or the store is away
                is_lossy = region in self.lossy_regions or self.is_unseen(region)
                if problem.kind == "hold-unknown" and is_kept and not is_lossy:
                    self.forgotten_holds.append(f"{action} {amount} in {region}: {problem.detail}")

    async def _ask(self, agent: Agent, route: str, cost: int, mode: str, tenant: str = "acme") -> None:
        costs = {"mails": 2 * cost} if cost == COSTS_DIFFER and mode == "enforce" else None
        check = Check(
            subject=Subject(tenant=tenant, route=route, method="GET", labels=MODELS[cost % len(MODELS)]),
            cost=cost,
            costs=costs,
            mode="adjust" if mode == "adjust" else "enforce",
        )
        asked_s = self.loop.time()
        try:
            verdict = await agent.real.admission.decide(check)
        except (NoPoliciesYet, InvalidSubjectValue):
            return
        except AboveCeiling as refused:
            if mode != "adjust" or cost < ABSURD:
                self._bug("an ordinary check was refused as too large", refused)
            self.coordinators.outcomes["above the ceiling"] += 1
            return
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._bug("a check raised", error)
            return
        if cost >= ABSURD and verdict.answer.policies:  # else no policy met it, and nothing was booked
            self.bugs.append(f"{cost} units were booked by one adjustment")
        if not agent.is_alive:
            return
        if tenant == "acme":
            self._note_denials(agent, asked_s, check, verdict.answer)
        if verdict.answer.allowed:
            heard = self.truth.heard if verdict.answer.degraded is None else self.truth.heard_without
            for policy in verdict.answer.policies:
                if policy.kind == "allowance":
                    quota, units = subject_key(policy.quota, {"tenant": tenant}), cost_of(check, policy.quota)
                    heard[quota] += units
                    self._note_labels(check.subject, quota, units)
                    if verdict.answer.degraded is None:
                        self.truth.answered[agent.region, quota] += units

    def _note_labels(self, subject: Subject, quota: str, units: int) -> None:
        if self.has_labels and subject.route == "/exports" and subject.labels:
            self.truth.heard_labelled[quota, f"model={subject.labels['model']}"] += units

    def _note_denials(self, agent: Agent, asked_s: float, check: Check, answer: CheckAnswer) -> None:
        """Note since when every request in a region is denied by an allowance."""
        for policy in answer.policies:
            if policy.kind == "allowance":
                about = (agent.region, f"{policy.quota}:tenant=acme")
                if policy.allowed or cost_of(check, policy.quota) > policy.limit:
                    self.denials.pop(about, None)
                else:
                    first = self.denials.setdefault(about, Denials(asked_s, asked_s, agent.name))
                    first.last_asked_s, first.by = max(first.last_asked_s, asked_s), agent.name

    # --- the composition ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def composed(self) -> Iterator[None]:
        """Put the agent together as `RegionalAgent` does; its two connections lead into this world."""
        tokens = self.chance("nonces")

        class Tokens:
            @staticmethod
            def token_hex(size: int) -> str:
                return tokens.randbytes(size).hex()

            @staticmethod
            def token_bytes(size: int) -> bytes:
                return tokens.randbytes(size)

        with contextlib.ExitStack() as patches:
            patches.enter_context(patch.object(region_module, "StoreConnection", self._connection))
            patches.enter_context(patch.object(region_module, "CoordinatorClient", self._client))
            patches.enter_context(patch.object(epoch_module, "secrets", Tokens))
            patches.enter_context(patch.object(hold_ids, "secrets", Tokens))
            patches.enter_context(patch.object(region_module, "JournalDirectory", self._disk))
            with heard_by(self._log):
                yield

    def _agent(self, name: str) -> Agent:
        return next(agent for agent in self.agents if agent.name == name)

    def _connection(self, endpoint: Server, **options: Any) -> VirtualConnection:
        agent = self._agent(endpoint.host)
        return VirtualConnection(self.machines[agent.region], lambda: self._may_act(agent), **options)

    def _disk(self, name: str) -> VirtualDirectory:
        agent = self._agent(name)
        return VirtualDirectory(self.disks[agent.region], agent.name, lambda: self._may_act(agent), self._lives)

    def _lives(self, name: str) -> bool:
        return self._agent(name).is_alive

    def _client(self, urls: Sequence[str], token: SecretStr, region: str, name: str, tls: None) -> VirtualClient:
        agent = self._agent(name)
        client = VirtualClient(region, self.coordinators, self.weather[region], lambda: self._may_act(agent))
        agent.client = client
        return client

    def _may_act(self, agent: Agent) -> bool:
        """Decide before each reply that reaches an agent whether it dies there."""
        if agent.is_alive and agent.calls_left is not None:
            agent.calls_left -= 1
            if agent.calls_left < 0:
                self.kill(agent)
        return agent.is_alive

    def _log(self, event: dict[str, Any]) -> None:
        if event.get("exc_info"):
            self.bugs.append(f"{event.get('event')}: {event['exc_info']!r}")

    def in_journals(self) -> int:
        """Return the units that were admitted without the store."""
        return sum(sum(disk.kept().values()) for disk in self.disks.values())

    def commit(self, transaction: Transaction) -> None:
        self.ledger.commit(transaction)

    def put_limits(self, limit: int, modes: Modes) -> None:
        self.limit, self.modes = limit, modes
        self.commit(self.ledger.put_limits(document(limit, modes, self.calendars, has_labels=self.has_labels)))


@contextlib.contextmanager
def heard_by(listener: Any) -> Iterator[None]:
    """Send what the agents log to the listener only."""
    before = structlog.get_config()

    def process(_: Any, level: str, event: Any) -> Any:
        if event.get("exc_info") is True:
            event["exc_info"] = sys.exc_info()[1]
        listener(event)
        raise structlog.DropEvent

    structlog.configure(processors=[process], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


def happen(world: World, event: Event) -> None:
    _HAPPENS[event.kind](world, event)


def _kill(world: World, event: Event) -> None:
    if agents := world.alive(event.region):
        agents[event.number % len(agents)].calls_left = event.number


def _periods_in(key: str, value: dict[str, str]) -> set[str]:
    """Return the periods that a lease or its usage lines name."""
    if ":usage:" in key:
        return {line.split("|", 1)[0] for line in value}
    ended = {name.removeprefix("ended:") for name in value if name.startswith("ended:")}
    return ended | {value[name] for name in ("period", "next:period") if name in value}


def cost_of(check: Check, quota: str) -> int:
    return (check.costs or NO_COSTS).get(quota, check.cost or 1)


def _stop(world: World, event: Event) -> None:
    if agents := world.alive(event.region):
        task = world.loop.create_task(world.stop(agents[0], return_unspent=bool(event.number)))
        world._services.add(task)
        task.add_done_callback(world._services.discard)


def _restart(world: World, event: Event) -> None:
    if event.region in world.lost_regions:
        return
    machine = world.machines[event.region]
    snapshot: Any = None
    unseen = False
    if event.kind in ("store_loses_a_moment", "store_rolls_back", "store_goes_back_unseen"):
        snapshot = world.snapshots.get((event.region, event.step - event.number), ({}, {}))
        if machine.store.is_exempt and event.kind == "store_loses_a_moment":
            snapshot = None  # every write was on disk
        if machine.store.is_exempt and event.kind == "store_rolls_back":  # somebody put a backup there
            unseen = not _is_told(world, snapshot[0])
    elif event.kind == "store_loses_all":
        snapshot = ({}, {})
    if snapshot is not None:
        world.lossy_regions.add(event.region)
    is_same_incarnation = event.kind == "store_goes_back_unseen"
    if unseen or is_same_incarnation:
        world.note_unseen(event.region, *machine.store.data.items(), *snapshot[0].items())
    machine.restart(snapshot, is_another_incarnation=not is_same_incarnation)
    machine.admitting_epoch = 0 if is_same_incarnation else machine.admitting_epoch


def _fail_over(world: World, event: Event) -> None:
    machine = world.machines[event.region]
    if machine.store.replica is not None:
        if event.region not in world.lost_regions:
            _promote(world, event.region, machine.stale or machine.store.replica)
        return
    snapshot = world.snapshots.get((event.region, event.step - event.number))
    is_exempt = world.machines[event.region].store.is_exempt  # it has no replica
    if snapshot is not None and event.region not in world.lost_regions and not is_exempt:
        world.lossy_regions.add(event.region)
        world.machines[event.region].fail_over(snapshot)


def _promote(world: World, region: str, replica: Replica) -> None:
    if world.machines[region].promote(replica):
        world.coordinators.outcomes["promoted"] += 1
    else:
        world.lossy_regions.add(region)


def _replica(world: World, event: Event) -> None:
    machine = world.machines[event.region]
    if machine.store.replica is None:
        return
    if event.kind == "replica_replaced":
        machine.replace_replica()
    elif event.kind == "replica_linked":
        machine.link_replica()
    else:
        machine.hang_replica()


def _fail_back(world: World, event: Event) -> None:
    """Fail back to the former machine. An agent that does not notice continues in the epoch that it finds there, until
    the coordinator tells it. What it spends there is of that epoch's lease: all of it is in suspense.
    """
    machine = world.machines[event.region]
    if machine.left is not None and event.region not in world.lost_regions:
        if machine.left.replica is not None:
            world.lossy_regions.add(event.region)  # another store has gone on with its epoch
        machine.fail_back()
        machine.admitting_epoch = 0


def _is_told(world: World, data: dict[str, Any]) -> bool:
    """Return whether a store with this data knows less of its epoch than the ledger has booked."""
    epoch = data.get("lh:fence", {}).get("epoch")
    if epoch is None:
        return True
    for lane in range(LANES):
        row, kept = world.ledger.lane_rows.get((int(epoch), lane)), data.get(f"lh:{{{lane}}}:lane:{epoch}", {})
        if row is None or max(int(kept.get("seq", 0)), int(kept.get("frozen_seq", 0))) < row.last_seq:
            return True
    return False


def _usurp(world: World, event: Event) -> None:
    """Point the address to another store for a moment. The region's own store keeps its incarnation and its data.

    2: a person moved the address on purpose and declares that the store has kept its data.
    """
    nonce, region = f"{world.random.getrandbits(128):032x}", event.region
    current = (number for number, epoch in world.ledger.epochs.items() if is_current(epoch, region))
    previous = next(current, None) if event.number == 2 else None
    request = OpenEpoch(nonce=nonce, fingerprint=f"usurper-{nonce}", previous=previous, lost_data=previous is None)
    _, transaction = world.ledger.open_epoch(region, request, world.clock.now())
    world.commit(transaction)


def is_current(epoch: Epoch, region: str) -> bool:
    return epoch.region == region and epoch.state is EpochState.CURRENT


def _store_down(world: World, event: Event) -> None:
    machine = world.machines[event.region]
    machine.stop()

    def again() -> None:
        if event.region not in world.lost_regions:
            machine.restart(None, is_another_incarnation=True)
            machine.start()

    world.until[event.step + event.number].append(again)


_AS_USUAL = {"sends": True, "hears": True, "is_slow": False, "is_up": True, "loss": 0.005, "lateness": 0.01} | {
    "doubling": 0.01,
    "transaction_s": TRANSACTION_S,
}


def _for_a_while(world: World, event: Event, thing: Any, **changed: Any) -> None:
    def end() -> None:
        for name in changed:
            setattr(thing, name, _AS_USUAL[name])

    for name, value in changed.items():
        setattr(thing, name, value)
    world.until[event.step + event.number].append(end)


def _weather(**changed: Any) -> Any:
    return lambda world, event: _for_a_while(world, event, world.weather[event.region], **changed)


def _calm(world: World, event: Event) -> None:
    for weather in world.weather.values():
        _for_a_while(world, event, weather, loss=0.0, lateness=0.0, doubling=0.0)


def _forget(part: str) -> Any:
    """Remove a key of a store that goes on running, which nothing can notice."""

    def forget(world: World, event: Event) -> None:
        machine = world.machines[event.region]
        if keys := sorted(key for key in machine.store.data if part in key):
            key = keys[event.number % len(keys)]
            world.lossy_regions.add(event.region)
            world.note_unseen(event.region, (key, machine.store.data[key]), kinds=[":usage:"])  # a lease is missed
            machine.restarts += 1  # its totals are none of those before
            machine.rates.forget()
            machine.store.delete(key)

    return forget


def _jump(world: World, event: Event) -> None:
    machine = world.machines[event.region]
    back = event.kind == "clock_jumps_back"
    machine.offset_us += event.number * (-1_000_000 if back else 1_000_000)
    machine.jumped_back |= back


def _ledger_fails_over(world: World, event: Event) -> None:
    """Fail the ledger over: connections are lost and open transactions rolled back. Commits are replicated first."""
    world.coordinators.dies_before_commit += 1
    if event.kind in LEDGER_LOSSES:
        world.ledger_lost += 1
        world.ledger.lose(event.number or world.ledger.since_approval())
        world.rebased.clear()  # that may be lost, too
        for region in REGIONS:
            if lost := _told_and_lost(world, region):
                world.told_and_lost[region] = lost
                world.coordinators.alarmed.discard(region)
    else:
        world.coordinators.fail_over(event.number)


def _told_and_lost(world: World, region: str) -> set[ReportName]:
    """Return the reports that the region's store has receipts for, but the ledger has lost."""
    store = world.machines[region].store
    epoch = int(store.hash("lh:fence").get("epoch", 0))
    booked = {lane: row.last_seq for (number, lane), row in world.ledger.lane_rows.items() if number == epoch}
    told = {lane: int(store.hash(f"lh:{{{lane}}}:lane:{epoch}").get("seq", 0)) for lane in range(LANES)}
    return {(epoch, lane, seq) for lane, last in told.items() for seq in range(booked.get(lane, 0) + 1, last + 1)}


def _lose_region(world: World, event: Event) -> None:
    if len(world.lost_regions) < 1:
        world.lost_regions.add(event.region)
        world.machines[event.region].stop()
        for agent in world.alive(event.region):
            world.kill(agent)


def _retire(world: World, event: Event) -> None:
    for number, epoch in world.ledger.epochs.items():
        is_given_up = epoch.state is EpochState.CURRENT and event.region in world.lost_regions
        if epoch.region == event.region and (epoch.state is EpochState.FENCED or is_given_up):
            world.commit(world.ledger.retire_epoch(number, world.clock.now()))
            return


def _burst(world: World, event: Event) -> None:
    for _ in range(event.number):
        world.ask(event.region, world.random)


def _coordinator(**changed: Any) -> Any:
    def change(world: World, event: Event) -> None:
        for name in changed:
            setattr(world.coordinators, name, getattr(world.coordinators, name) + event.number)

    return change


def _set_demand(world: World, event: Event) -> None:
    world.demand[event.region] = event.number


def _skew(world: World, event: Event) -> None:
    """Send the region's calls to a coordinator whose clock is hours ahead."""
    skews, ahead = world.coordinators.skews, timedelta(hours=event.number)
    skews[event.region] = ahead
    world.until[event.step + 4].append(lambda: skews.pop(event.region, None) and None)


def _slow(world: World, event: Event) -> None:
    _for_a_while(world, event, world.machines[event.region], is_slow=True)


_HAPPENS: dict[str, Any] = {
    "demand": _set_demand,
    "burst": _burst,
    "adjust": lambda world, event: world.ask(event.region, world.random, "adjust", event.number),
    "kill_agent": _kill,
    "stop_agent": _stop,
    "start_agent": lambda world, event: world.start_agent(event.region),
    "store_restarts": _restart,
    "store_loses_a_moment": _restart,
    "store_rolls_back": _restart,
    "store_loses_all": _restart,
    "store_goes_back_unseen": _restart,
    "store_fails_over": _fail_over,
    "store_fails_back": _fail_back,
    "replica_hangs": _replica,
    "replica_replaced": _replica,
    "replica_linked": _replica,
    "store_down": _store_down,
    "store_usurped": _usurp,
    "store_slow": _slow,
    "store_hangs_up": lambda world, event: world.machines[event.region].hang_up(),
    "store_forgets_lines": _forget(":usage:"),
    "store_forgets_a_lease": _forget(":lease:"),
    "clock_jumps_ahead": _jump,
    "clock_jumps_back": _jump,
    "partition": _weather(sends=False, hears=False),
    "region_is_deaf": _weather(hears=False),
    "region_is_mute": _weather(sends=False),
    "bad_weather": _weather(loss=0.3, lateness=0.3),
    "fair_weather": _calm,
    "coordinator_down": lambda world, event: _for_a_while(world, event, world.coordinators, is_up=False),
    "coordinator_dies_before": _coordinator(dies_before_commit=1),
    "coordinator_dies_after": _coordinator(dies_after_commit=1),
    "ledger_fails_over": _ledger_fails_over,
    "ledger_loses": _ledger_fails_over,
    "approval_lost": _ledger_fails_over,
    "ledger_slow": lambda world, event: _for_a_while(world, event, world.coordinators, transaction_s=0.5),
    "limit": lambda world, event: world.put_limits(event.number, world.modes),
    "mode": lambda world, event: world.put_limits(world.limit, Modes.of(event.number)),
    "period_changes": operators.change_period,
    "zone_changes": operators.change_zone,
    "store_evicts": _forget("lh:"),
    "many_tenants": lambda world, event: world.ask_for_many(event.region, event.number),
    "long_name": lambda world, event: world.ask_with_long_name(event.region, event.number),
    "catalogue_changes_late": lambda world, event: world.change_limit_late(event.number),
    "coordinator_clock": _skew,
    "region_lies": operators.lie,
    "absurd_cost": lambda world, event: world.ask(event.region, world.random, "adjust", ABSURD + event.number),
    "document_changes": operators.change_document,
    "override": operators.override,
    "suspense_resolved": operators.resolve,
    "period_closed": operators.close,
    "hours_pass": operators.let_hours_pass,
    "moved": operators.move,
    "evened_out": operators.even_out,
    "set": operators.divide,
    "credited": operators.adjust,
    "debited": operators.adjust,
    "written_off": operators.adjust,
    "strange_call": operators.strange_call,
    "tries": lambda world, event: world.try_often(event.region, event.number),
    "tries_refunded": lambda world, event: world.refund(event.region, event.number),
    "tries_reset": operators.reset_tries,
    "region_drains": lambda world, event: world.commit(world.ledger.put_region(event.region, "draining")),
    "region_returns": lambda world, event: world.commit(world.ledger.put_region(event.region, "active")),
    "region_down": lambda world, event: world.commit(world.ledger.put_region(event.region, "down")),
    "epoch_retired": _retire,
    "region_lost": _lose_region,
    "later": lambda world, event: None,
}
