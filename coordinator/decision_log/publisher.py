"""Send decisions to Kafka, beside the table or in place of it.

Nothing waits for Kafka. A message is put into librdkafka's queue, which is bounded in bytes and in time, and which
keeps the order of each key. What does not fit, or is not taken in time, is counted as lost by its reason. A thread
serves the queue's callbacks. At the end the queue has CLOSE_WITHIN_S to empty itself.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

import structlog

from coordinator.decision_log.kafka_settings import KafkaSettings, producer_options
from coordinator.decision_log.metrics import PublishedDecisionMetrics
from coordinator.decision_log.rules.published import message_of
from coordinator.decision_log.rules.rows import DecisionRow

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

log = structlog.get_logger()

SERVE_WITHIN_S = 0.5
CLOSE_WITHIN_S = 5.0
LATE_AFTER_S = 10.0  # without a message that is taken, while some wait
REMEMBERED_S = 60.0  # a loss is a reason to be degraded for so long


class DecisionPublisher:
    def __init__(self, settings: KafkaSettings, metrics: PublishedDecisionMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._password = settings.kafka_sasl_password.get_secret_value()
        self._producer = self._open()
        self._waiting_since_s: float | None = None  # without a message that was taken
        self._lost_at_s: float | None = None
        self._error = ""
        self._is_closing = False

    def publish(self, rows: Sequence[DecisionRow]) -> None:
        """Put decisions into the queue, in their order. It may be called from any thread, and never waits."""
        for place, row in enumerate(rows):
            key = row.tenant.encode() or None
            try:
                self._producer.produce(self._settings.kafka_topic, message_of(row), key, on_delivery=self._delivered)
            except BufferError:
                self._lose("full", len(rows) - place)
                return
            except _kafka_exception() as error:
                self._lose("refused")
                self._note_error(error.args[0])

    @property
    def finding(self) -> str | None:
        """Return why decisions do not reach Kafka now, or None."""
        now_s = monotonic()
        is_late = self._waiting_since_s is not None and now_s - self._waiting_since_s >= LATE_AFTER_S
        has_lost = self._lost_at_s is not None and now_s - self._lost_at_s < REMEMBERED_S
        if not is_late and not has_lost:
            return None
        what = "decisions for it were lost" if has_lost else "decisions wait for it"
        return f"Kafka does not take the decision log, and {what}: {self._error or 'no answer'}"

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        while True:
            await asyncio.to_thread(self._serve)

    async def close(self) -> None:
        """Let the queue empty itself, within CLOSE_WITHIN_S. What is left is lost."""
        self._is_closing = True
        left = await asyncio.to_thread(self._producer.flush, CLOSE_WITHIN_S)
        if left:
            self._producer.purge()
            self._producer.flush(0)
            log.warning("decision log lost", reason=self._error or "Kafka did not take it in time", decisions=left)

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _open(self) -> "Producer":
        from confluent_kafka import Producer  # noqa: PLC0415 - an extra

        return Producer({**producer_options(self._settings), "error_cb": self._note_error})

    def _serve(self) -> None:
        self._renew_password()
        taken = self._metrics.sent_messages
        self._producer.poll(SERVE_WITHIN_S)
        waiting = len(self._producer)
        self._metrics.waiting.set(waiting)
        if not waiting:
            self._waiting_since_s = None
        elif self._waiting_since_s is None or self._metrics.sent_messages > taken:
            self._waiting_since_s = monotonic()

    def _renew_password(self) -> None:
        password = self._settings.kafka_sasl_password.get_secret_value()
        if password != self._password:
            self._password = password
            self._producer.set_sasl_credentials(self._settings.kafka_sasl_username, password)

    def _delivered(self, error: "KafkaError | None", _: "Message") -> None:
        if error is None:
            self._metrics.count_sent()
            if self._error:
                log.info("Kafka takes the decision log again")
                self._error = ""
            return
        if self._is_closing:
            self._lose("closing")
        elif error.name() == "_MSG_TIMED_OUT":
            self._lose("timeout")
        else:
            self._lose("refused")
        self._note_error(error)

    def _lose(self, reason: str, count: int = 1) -> None:
        self._metrics.lost.labels(reason).inc(count)
        self._lost_at_s = monotonic()

    def _note_error(self, error: "KafkaError") -> None:
        """Note why Kafka does not take messages, and log it once until it takes them again."""
        if not self._error:
            log.warning("Kafka does not take the decision log", reason=error.str())
        self._error = error.str()


def _kafka_exception() -> type[Exception]:
    from confluent_kafka import KafkaException  # noqa: PLC0415 - an extra

    exception: Any = KafkaException
    return exception  # type: ignore[no-any-return]


@asynccontextmanager
async def open_publisher(
    settings: KafkaSettings, metrics: PublishedDecisionMetrics
) -> AsyncIterator[DecisionPublisher | None]:
    """Yield what sends decisions to Kafka, or None where no brokers are set."""
    if not settings.kafka_brokers:
        yield None
        return
    publisher = DecisionPublisher(settings, metrics)
    serving = asyncio.create_task(publisher.run(), name="decisions to Kafka")
    try:
        yield publisher
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await publisher.close()
