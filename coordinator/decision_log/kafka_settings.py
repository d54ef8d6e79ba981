"""The settings of the decision log in Kafka."""

from importlib.util import find_spec
from typing import Literal, Self

from pydantic import Field, FilePath, SecretStr, model_validator

from web.settings import Settings, variable_of

NEEDED_BY_SASL = ("kafka_sasl_username", "kafka_sasl_password")


class KafkaSettings(Settings):
    """The base of settings of a service that publishes decisions in Kafka."""

    kafka_brokers: str = Field(
        default="",
        max_length=2000,
        examples=["kafka-1:9092,kafka-2:9092"],
        description=(
            "Brokers of Kafka, separated by commas, to which the decision log is sent as well. "
            "Without them it is not. Needs the extra `kafka`."
        ),
    )
    kafka_topic: str = Field(
        default="leasehold.decisions",
        pattern=r"^[A-Za-z0-9._-]{1,249}$",
        examples=["leasehold.decisions"],
        description="Topic of the decision log.",
    )
    kafka_security_protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = Field(
        default="plaintext",
        examples=["sasl_ssl"],
        description="How brokers are reached: `plaintext`, `ssl`, `sasl_plaintext` or `sasl_ssl`.",
    )
    kafka_ca_file: FilePath | None = Field(
        default=None,
        examples=["/etc/leasehold/kafka-ca.pem"],
        description="Certificates (PEM) that may sign those of the brokers. Without it, those that the machine trusts.",
    )
    kafka_cert_file: FilePath | None = Field(
        default=None,
        examples=["/etc/leasehold/kafka.pem"],
        description="Certificate (PEM) that is shown to the brokers. Needs `KAFKA_KEY_FILE`.",
    )
    kafka_key_file: FilePath | None = Field(
        default=None, examples=["/etc/leasehold/kafka.key"], description="Private key (PEM) of that certificate."
    )
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        default="SCRAM-SHA-512",
        examples=["SCRAM-SHA-512"],
        description="How a user proves itself: `PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512`.",
    )
    kafka_sasl_username: str = Field(
        default="", max_length=256, examples=["leasehold"], description="User at the brokers. Required with SASL."
    )
    kafka_sasl_password: SecretStr = Field(
        default=SecretStr(""),
        examples=["secret"],
        description="Password of that user. One in a file is read again when it changes.",
    )
    kafka_buffer_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=1024 * 1024,
        le=1024 * 1024 * 1024,
        examples=[33_554_432],
        description="Memory for decisions that wait for Kafka. More are lost, and counted.",
    )
    kafka_delivery_timeout_ms: int = Field(
        default=300_000,
        ge=1_000,
        le=86_400_000,
        examples=[300_000],
        description="How long a decision waits for Kafka before it is lost, and counted.",
    )

    @model_validator(mode="after")
    def _can_reach_kafka(self) -> Self:
        if not self.kafka_brokers:
            return self
        if find_spec("confluent_kafka") is None:
            raise ValueError(f"{self._variable('kafka_brokers')}: install leasehold[server,kafka] to send to Kafka")
        if (self.kafka_cert_file is None) != (self.kafka_key_file is None):
            names = self._variable("kafka_cert_file"), self._variable("kafka_key_file")
            raise ValueError(f"{names[0]} and {names[1]} belong together: set both, or none")
        missing = [name for name in NEEDED_BY_SASL if not _text(getattr(self, name))]
        if self.kafka_security_protocol.startswith("sasl") and missing:
            raise ValueError(f"{self._variable(missing[0])} is required with {self.kafka_security_protocol}")
        return self

    def _variable(self, name: str) -> str:
        return variable_of(type(self), name)


def _text(value: str | SecretStr) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def producer_options(settings: KafkaSettings) -> dict[str, str | int | bool]:
    """Return the options of librdkafka. A producer is idempotent: each message once, in the order of its key."""
    options: dict[str, str | int | bool] = {
        "bootstrap.servers": settings.kafka_brokers,
        "client.id": "leasehold-coordinator",
        "security.protocol": settings.kafka_security_protocol,
        "enable.idempotence": True,
        "compression.type": "gzip",
        "linger.ms": 100,
        "partitioner": "murmur2_random",  # as the clients in Java do
        "queue.buffering.max.kbytes": settings.kafka_buffer_bytes // 1024,
        "queue.buffering.max.messages": 0,  # the bytes are the bound
        "delivery.timeout.ms": settings.kafka_delivery_timeout_ms,
        "reconnect.backoff.max.ms": 2_000,
        "log_level": 0,  # errors are logged by us
    }
    files = {
        "ssl.ca.location": settings.kafka_ca_file,
        "ssl.certificate.location": settings.kafka_cert_file,
        "ssl.key.location": settings.kafka_key_file,
    }
    options |= {name: str(file) for name, file in files.items() if file is not None}
    if settings.kafka_security_protocol.startswith("sasl"):
        options |= {
            "sasl.mechanisms": settings.kafka_sasl_mechanism,
            "sasl.username": settings.kafka_sasl_username,
            "sasl.password": settings.kafka_sasl_password.get_secret_value(),
        }
    return options
