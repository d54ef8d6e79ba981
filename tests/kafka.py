"""A real Kafka of one node, in KRaft mode, whose broker can be stopped and started again."""

import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from leasehold.local_stack.processes import spawn, wait_until
from tests.certificates import Authority
from tests.waiting import BOUND_S

JAVA = ("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # it starts in half the time
USER, PASSWORD = "leasehold", "a secret of this test"
PARTITIONS = 2


@dataclass
class Kafka:
    """The plain listener is for the tests. The other one asks for TLS and a password, as a company's does."""

    libraries: Path
    directory: Path
    port: int
    sasl_port: int
    controller_port: int
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    authority: Authority = field(init=False)

    def __post_init__(self) -> None:
        self.authority = Authority(self.directory)
        certificate, key = self.authority.issue("broker")
        pem = self.directory / "broker-and-key.pem"
        pem.write_bytes(key.read_bytes() + certificate.read_bytes())
        (self.directory / "server.properties").write_text(
            SETTINGS.format(
                port=self.port,
                sasl_port=self.sasl_port,
                controller_port=self.controller_port,
                data=self.directory / "data",
                pem=pem,
                partitions=PARTITIONS,
            )
        )
        scram = f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"
        words = ["kafka.tools.StorageTool", "format", "-t", "4L6g3nShT-eMCtK--X86sw", "-c", "server.properties"]
        subprocess.run(
            [*JAVA, *words, "--add-scram", scram],
            cwd=self.directory,
            env=self._environment,
            check=True,
            capture_output=True,
        )

    @property
    def brokers(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def sasl_brokers(self) -> str:
        return f"127.0.0.1:{self.sasl_port}"

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CLASSPATH": f"{self.libraries}/*"}

    def launch(self) -> None:
        """Start the broker, from the main thread: it ends with the thread that starts it."""
        command = [*JAVA, "kafka.Kafka", str(self.directory / "server.properties")]
        self.process = spawn(command, log=self.directory / "broker.log", environ=self._environment)

    def wait(self) -> None:
        """Wait until the broker answers."""
        admin = AdminClient({"bootstrap.servers": self.brokers, "log_level": 0})

        def answers() -> bool:
            with suppress(Exception):
                return bool(admin.list_topics(timeout=2).brokers)
            return False

        assert wait_until(answers, BOUND_S), (self.directory / "broker.log").read_text()[-2_000:]

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(BOUND_S)
            self.process = None

    @contextmanager
    def refusing_producers(self) -> Iterator[Callable[[], None]]:
        """Let the broker refuse producers of USER, which makes an idempotent one fail for good.

        Yield a function that lets it accept them again.
        """
        admin = AdminClient({"bootstrap.servers": self.brokers, "log_level": 0})
        about: list[Any] = [
            (kind, name, ResourcePatternType.LITERAL, f"User:{USER}", "*", operation, AclPermissionType.DENY)
            for kind, name, operation in (
                (ResourceType.TOPIC, "*", AclOperation.WRITE),
                (ResourceType.BROKER, "kafka-cluster", AclOperation.IDEMPOTENT_WRITE),
            )
        ]
        for done in admin.create_acls([AclBinding(*each) for each in about]).values():
            done.result(BOUND_S)

        def accept() -> None:
            for done in admin.delete_acls([AclBindingFilter(*each) for each in about]).values():
                done.result(BOUND_S)

        try:
            yield accept
        finally:
            accept()

    def topic(self) -> str:
        """Make a topic, and return its name."""
        name = f"decisions-{secrets.token_hex(4)}"
        producer = Producer({"bootstrap.servers": self.brokers, "log_level": 0})
        assert wait_until(lambda: len(producer.list_topics(name, 5).topics[name].partitions) == PARTITIONS, BOUND_S)
        return name

    def read(self, topic: str, count: int) -> list[tuple[str, dict[str, Any]]]:
        """Return key and value of so many messages, in the order of each partition."""
        consumer = Consumer(
            {"bootstrap.servers": self.brokers, "group.id": secrets.token_hex(4), "log_level": 0}
            | {"auto.offset.reset": "earliest", "enable.auto.commit": False}
        )
        consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        found: list[tuple[str, dict[str, Any]]] = []

        def has_all() -> bool:
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                key, value = message.key() or b"", message.value() or b""
                found.append((key.decode(), msgspec.json.decode(value)))
            return len(found) >= count

        try:
            assert wait_until(has_all, BOUND_S), f"{len(found)} of {count} messages"
        finally:
            consumer.close()
        return found


SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},SASL_SSL://127.0.0.1:{sasl_port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SASL_SSL://127.0.0.1:{sasl_port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=true
super.users=User:ANONYMOUS
sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
ssl.keystore.type=PEM
ssl.keystore.location={pem}
log.dirs={data}
num.partitions={partitions}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
num.network.threads=1
num.io.threads=2
broker.session.timeout.ms=1000
broker.heartbeat.interval.ms=200
"""
