"""Decisions in a real Kafka: their schema and order, an outage of the broker, a full queue, TLS and passwords."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonschema_rs
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr, ValidationError

from coordinator.decision_log import publisher as publishing
from coordinator.decision_log.kafka_settings import KafkaSettings
from coordinator.decision_log.metrics import PublishedDecisionMetrics
from coordinator.decision_log.publisher import DecisionPublisher, open_publisher
from coordinator.decision_log.rules.published import PublishedDecision, message_of, message_schema
from coordinator.decision_log.rules.rows import DecisionRow
from tests.conftest import free_port
from tests.integration.coordinator.admin_harness import AdminHarness, admin_harness_on
from tests.integration.coordinator.decision_log.test_decision_log import EU, batch, decision, found, ms
from tests.integration.coordinator.fixtures import NOON
from tests.kafka import PASSWORD, USER, Kafka
from tests.parts import part, toolchain
from tests.waiting import attempts, until

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("kafka")]

ROOT = Path(__file__).parents[4]
GUIDE = ROOT / "docs" / "guides" / "decisions.md"
SCHEMA = ROOT / "compose" / "kafka" / "decision.schema.json"


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    toolchain("java")
    libraries = part("kafka") / "lib"
    kafka = Kafka(libraries, tmp_path_factory.mktemp("kafka"), free_port(), free_port(), free_port())
    try:
        kafka.launch()
        kafka.wait()
        yield kafka
    finally:
        kafka.stop()


class Outcome:
    """The counts of published decisions, read from the metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PublishedDecisionMetrics(self.registry)

    @property
    def sent(self) -> int:
        return self.metrics.sent_messages

    def lost(self, reason: str) -> float:
        return self._value("lost_total", reason=reason)

    @property
    def reopened(self) -> float:
        return self._value("producer_reopened_total")

    def _value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"leasehold_coordinator_decision_log_kafka_{name}", labels) or 0.0


@asynccontextmanager
async def publisher(brokers: str, topic: str, **settings: Any) -> AsyncIterator[tuple[DecisionPublisher, Outcome]]:
    outcome = Outcome()
    given = KafkaSettings(kafka_brokers=brokers, kafka_topic=topic, **settings)
    async with open_publisher(given, outcome.metrics) as opened:
        assert opened is not None
        yield opened, outcome


def rows(count: int, first: int = 0, tenant: str = "acme", agent: str = "agent-1") -> list[DecisionRow]:
    return [
        DecisionRow(NOON, UUID(int=number), tenant, "eu-west", agent, "denied", epoch=number)
        for number in range(first, first + count)
    ]


async def send(admin_harness: AdminHarness, body: bytes) -> None:
    region = await admin_harness.caller("region:eu-west")
    answer = await region.post(EU, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.extended
async def test_decisions_of_agents_are_in_kafka_as_the_schema_says(kafka: Kafka, database: str, tmp_path: Path) -> None:
    topic = kafka.topic()
    decisions = [
        decision(n, tenant=f"tenant-{n % 3}", subject={"tenant": f"tenant-{n % 3}", "user": "jane"}) for n in range(30)
    ]
    denials = decision(40, count=7, last_ms=ms(NOON + timedelta(seconds=40.5)), latency_us=250)
    admitted = decision(41, outcome="admitted", reason=None, weight=1_000.0)
    async with admin_harness_on(database, kafka_brokers=kafka.brokers, kafka_topic=topic) as admin_harness:
        await send(admin_harness, batch(*decisions, denials, admitted, lost=5))
        auditor = await admin_harness.caller("audit:read")
        in_postgres = {each["id"]: each for each in (await found(auditor))["data"]}
    messages = await asyncio.to_thread(kafka.read, topic, 33)
    schema = json.loads(SCHEMA.read_text())
    for key, message in messages:
        jsonschema_rs.validate(schema, message)
        assert key == message["tenant"]
    of_one = [message["at"] for key, message in messages if key == "tenant-1"]
    assert (len(of_one), of_one) == (10, sorted(of_one))
    assert "jane" not in str(messages)
    assert {message["id"]: message["key"] for _, message in messages if message["outcome"] != "lost"} == {
        id_: each["key"] for id_, each in in_postgres.items()
    }
    [lost] = (message for _, message in messages if message["outcome"] == "lost")
    assert (lost["tenant"], lost["count"]) == ("", 5)
    await the_guides_queries_find_them([message for _, message in messages])


async def the_guides_queries_find_them(messages: list[dict[str, Any]]) -> None:
    """Put what came out of Kafka into the documented tables of a ClickHouse, some of it twice, and ask it."""
    library, queries = (
        part("clickhouse"),
        re.findall(r"^```sql\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL),
    )
    later = messages[0] | {"schema_version": 2}
    request = {"messages": [json.dumps(each) for each in (*messages, *messages[:9], later)], "queries": queries}
    command = [sys.executable, "-m", "tests.clickhouse", str(library)]
    done = await asyncio.to_thread(
        subprocess.run, command, input=json.dumps(request), text=True, capture_output=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    why, by_policy, lost = map(json.loads, done.stdout.splitlines())
    assert [(each["count"], each["reason"], each["policy"]) for each in why] == [(7, "limit", "export")]
    assert {(each["tenant"], each["denied"], each["admitted"]) for each in by_policy} == {
        ("acme", 7, 1_000),
        *((f"tenant-{number}", 10, 0) for number in range(3)),
    }
    assert [each["lost"] for each in lost] == [5]


@pytest.mark.extended
async def test_kafka_alone_has_the_log_where_postgres_keeps_none(kafka: Kafka, database: str) -> None:
    topic = kafka.topic()
    settings: dict[str, Any] = {"kafka_brokers": kafka.brokers, "kafka_topic": topic, "decision_retention_days": 0}
    async with admin_harness_on(database, **settings) as admin_harness:
        await send(admin_harness, batch(decision(1), decision(2)))
        assert (await found(await admin_harness.caller("audit:read")))["data"] == []
    assert len(await asyncio.to_thread(kafka.read, topic, 2)) == 2


@pytest.mark.extended
async def test_an_outage_of_the_broker_delays_nothing_keeps_the_order_and_counts_what_does_not_fit(
    kafka: Kafka, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "LATE_AFTER_S", 0.5)
    monkeypatch.setattr("coordinator.health.monitor.LOOK_EVERY_S", 0.1)
    topic, flooded = kafka.topic(), kafka.topic()
    async with (
        admin_harness_on(database, kafka_brokers=kafka.brokers, kafka_topic=topic) as admin_harness,
        publisher(kafka.brokers, flooded, kafka_buffer_bytes=1024 * 1024) as (opened, outcome),
    ):
        await send(admin_harness, batch(*(decision(n) for n in range(5))))
        await asyncio.to_thread(kafka.stop)
        try:
            for number in range(2, 6):
                await send(admin_harness, batch(*(decision(10 * number + n) for n in range(5)), number=number))
                opened.publish(rows(1_000, first=1_000 * number))
            assert (await found(await admin_harness.caller("audit:read")))["summary"]["denied"] == 25
            assert (outcome.sent, outcome.lost("full") > 0) == (0, True)
            assert "were lost" in (opened.finding or "")
            await health(admin_harness, lambda codes: "kafka_unavailable" in codes)
            checks = (await (await admin_harness.caller("admin")).get("/v1/diagnosis")).json()["checks"]
            assert {each["state"] for each in checks if each["check"] == "coordinator_kafka"} == {"failed"}
        finally:
            await restart(kafka)
        await send(admin_harness, batch(decision(100), number=9))
        messages = await asyncio.to_thread(kafka.read, topic, 26)
        await health(admin_harness, lambda codes: "kafka_unavailable" not in codes)
        await until(lambda: outcome.sent + outcome.lost("full") == 4_000)
    times = [message["at"] for _, message in messages]
    assert (times, len({message["id"] for _, message in messages})) == (sorted(times), 26)
    numbers = [message["epoch"] for _, message in await asyncio.to_thread(kafka.read, flooded, outcome.sent)]
    assert numbers == sorted(set(numbers))


async def restart(kafka: Kafka) -> None:
    kafka.launch()
    await asyncio.to_thread(kafka.wait)


async def health(admin_harness: AdminHarness, is_expected: Callable[[set[str]], bool]) -> None:
    """Wait until the coordinator reports the reasons that are expected."""
    caller, seen = admin_harness.caller_with({}), set[str]()
    async for _ in attempts():
        seen = {each["code"] for each in (await caller.get("/readyz")).json()["reasons"]}
        if is_expected(seen):
            return
    raise AssertionError(f"the reasons are {seen}")


@pytest.mark.extended
async def test_what_waits_too_long_and_what_is_left_at_the_end_are_lost_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "CLOSE_WITHIN_S", 0.2)
    nowhere = f"127.0.0.1:{free_port()}"
    async with publisher(nowhere, "t", kafka_delivery_timeout_ms=1_000) as (opened, outcome):
        opened.publish(rows(3))
        await until(lambda: outcome.lost("timeout") == 3)
        assert "were lost" in (opened.finding or "")
    async with publisher(nowhere, "t") as (opened, outcome):
        opened.publish(rows(4))
    assert (outcome.lost("closing"), outcome.sent) == (4, 0)


@pytest.mark.extended
async def test_a_message_that_is_too_large_is_lost_by_itself(kafka: Kafka) -> None:
    topic = kafka.topic()
    async with publisher(kafka.brokers, topic) as (opened, outcome):
        large = rows(1)[0]._replace(subject=json.dumps({"route": "x" * 2_000_000}))
        opened.publish([*rows(2), large, *rows(2, first=5)])
        await until(lambda: outcome.sent == 4)
        assert outcome.lost("refused") == 1


def secured(kafka: Kafka) -> dict[str, Any]:
    """Return the settings of the listener that asks for TLS and a password."""
    files: dict[str, Any] = {"kafka_ca_file": kafka.authority.file, "kafka_sasl_username": USER}
    return {"kafka_security_protocol": "sasl_ssl", **files}


@pytest.mark.extended
async def test_brokers_are_reached_by_tls_and_a_password_that_may_change(kafka: Kafka) -> None:
    topic = kafka.topic()

    class Changing(SecretStr):
        value = "not this one"

        def get_secret_value(self) -> str:
            return self.value

    password = Changing("x")
    settings = KafkaSettings(
        kafka_brokers=kafka.sasl_brokers, kafka_topic=topic, kafka_sasl_password=SecretStr("other"), **secured(kafka)
    ).model_copy(update={"kafka_sasl_password": password})
    outcome = Outcome()
    async with open_publisher(settings, outcome.metrics) as opened:
        assert opened is not None
        opened.publish(rows(2))
        await until(lambda: "uthentication" in opened._error)
        assert outcome.sent == 0
        password.value = PASSWORD
        await until(lambda: outcome.sent == 2)
    assert len(await asyncio.to_thread(kafka.read, topic, 2)) == 2


@pytest.mark.extended
async def test_a_producer_that_failed_for_good_is_opened_again_and_its_losses_are_counted(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that refuses a producer its id makes librdkafka's accept nothing any more."""
    monkeypatch.setattr(publishing, "REOPEN_AFTER_S", 1.0)
    topic, settings, published = kafka.topic(), secured(kafka) | {"kafka_sasl_password": PASSWORD}, 0
    with kafka.refusing_producers() as accept:
        async with publisher(kafka.sasl_brokers, topic, **settings) as (opened, outcome):

            async def publish_until(condition: Callable[[], object]) -> None:
                nonlocal published
                async for _ in attempts():
                    opened.publish(rows(1, first=published))
                    published += 1
                    if condition():
                        return
                raise AssertionError(f"{outcome.reopened} producers were opened again, {outcome.sent} sent")

            await publish_until(lambda: outcome.lost("fatal") and outcome.reopened)
            assert "had to be opened again" in (opened.finding or "")
            accept()
            await publish_until(lambda: outcome.sent)
    assert outcome.sent + sum(map(outcome.lost, ("refused", "fatal"))) == published
    assert len(await asyncio.to_thread(kafka.read, topic, outcome.sent)) == outcome.sent


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kafka_security_protocol": "sasl_ssl"}, "KAFKA_SASL_USERNAME"),
        ({"kafka_security_protocol": "sasl_ssl", "kafka_sasl_username": "a"}, "KAFKA_SASL_PASSWORD"),
        ({"kafka_cert_file": __file__}, "KAFKA_KEY_FILE"),
        ({"kafka_topic": "a topic"}, "kafka_topic"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        KafkaSettings(kafka_brokers="k:9092", **settings)


def test_the_published_schema_is_that_of_the_messages() -> None:
    """Write it with LEASEHOLD_WRITE_SCHEMA=1."""
    if "LEASEHOLD_WRITE_SCHEMA" in os.environ:
        SCHEMA.parent.mkdir(exist_ok=True)
        SCHEMA.write_text(json.dumps(message_schema(), indent=2) + "\n")
    assert json.loads(SCHEMA.read_text()) == message_schema()


def test_a_message_is_read_back_as_it_was() -> None:
    [row] = rows(1)
    message = msgspec.json.decode(message_of(row), type=PublishedDecision)
    assert (message.id, message.at, message.tenant, message.outcome) == (row.id, row.at, row.tenant, row.outcome)
