"""Send decisions to Kafka, beside the table or in place of it.

Nothing waits for Kafka. A message is put into librdkafka's queue, which is bounded in bytes and in time, and which
keeps the order of each key. What does not fit, or is not taken in time, is counted as lost by its reason. A thread
serves the queue's callbacks. At the end the queue has CLOSE_WITHIN_S to empty itself.

After some errors an idempotent producer accepts nothing any more, because it can no longer promise the order (a fatal
error of librdkafka). The thread then closes it, counts what was in its queue as lost, and opens another one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
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
REMEMBERED_S = 60.0  # a loss, or a producer that failed, is a reason to be degraded for so long
REOPEN_AFTER_S = 5.0  # since the producer was opened: what made it fail may fail the next one as well
PURGE_WITHIN_S = 1.0


class DecisionPublisher:
    def __init__(self, settings: KafkaSettings, metrics: PublishedDecisionMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._password = ""
        self._opened_at_s = 0.0
        self._has_failed = False  # for good: the producer accepts nothing any more
        self._failed_at_s: float | None = None
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
                self._note_error(error.args[0])
                self._lose("fatal" if self._has_failed else "refused")

    @property
    def finding(self) -> str | None:
        """Return why decisions do not reach Kafka now, or None."""
        now_s = monotonic()
        is_late = self._waiting_since_s is not None and now_s - self._waiting_since_s >= LATE_AFTER_S
        has_lost, has_failed = _is_recent(self._lost_at_s, now_s), _is_recent(self._failed_at_s, now_s)
        if not is_late and not has_lost and not has_failed:
            return None
        what = "decisions for it were lost" if has_lost else "decisions wait for it"
        if has_failed:
            what += ", and the producer had to be opened again"
        return f"Kafka does not take the decision log, and {what}: {self._error or 'no answer'}"

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        while True:
            await asyncio.to_thread(self._serve)

    async def close(self) -> None:
        """Let the queue empty itself, within CLOSE_WITHIN_S. What is left is lost."""
        self._is_closing = True
        left = await asyncio.to_thread(self._flush, CLOSE_WITHIN_S)
        if left:
            self._purge()
            log.warning("decision log lost", reason=self._error or "Kafka did not take it in time", decisions=left)

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _open(self) -> "Producer":
        from confluent_kafka import Producer  # noqa: PLC0415 - an extra

        self._opened_at_s = monotonic()
        self._password = self._settings.kafka_sasl_password.get_secret_value()
        return Producer({**producer_options(self._settings), "error_cb": self._note_error})

    def _reopen(self) -> None:
        """Replace a producer that has failed for good, and count what was in its queue as lost."""
        self._purge()
        try:
            self._producer = self._open()
        except _kafka_exception() as error:  # such as of a file that is missing by now
            self._note_error(error.args[0])
            return
        self._has_failed = False
        self._metrics.reopened.inc()
        log.warning("the Kafka producer failed, and was opened again", reason=self._error)

    def _purge(self) -> None:
        """Give up what is in the queue. Each message is then counted by `_delivered`."""
        self._producer.purge()
        self._flush(PURGE_WITHIN_S)

    def _flush(self, seconds: float) -> int:
        """Serve the queue until it is empty, and return how many messages are left."""
        self._guarded(self._producer.flush, seconds)
        return len(self._producer)

    def _serve(self) -> None:
        if self._has_failed and monotonic() - self._opened_at_s >= REOPEN_AFTER_S:
            self._reopen()
        self._renew_password()
        taken = self._metrics.sent_messages
        self._guarded(self._producer.poll, SERVE_WITHIN_S)
        waiting = len(self._producer)
        self._metrics.waiting.set(waiting)
        if not waiting:
            self._waiting_since_s = None
        elif self._waiting_since_s is None or self._metrics.sent_messages > taken:
            self._waiting_since_s = monotonic()

    def _guarded(self, serve: Callable[[float], int], seconds: float) -> None:
        """Note a fatal error, which the library raises here, and for which it calls no callback."""
        try:
            serve(seconds)
        except _kafka_exception() as error:
            self._note_error(error.args[0])

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
        elif self._has_failed:
            self._lose("fatal")
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
        if error.fatal() or error.name() == "_FATAL":
            self._has_failed, self._failed_at_s = True, monotonic()
        if not self._error:
            log.warning("Kafka does not take the decision log", reason=error.str())
        self._error = error.str()


def _is_recent(moment_s: float | None, now_s: float) -> bool:
    return moment_s is not None and now_s - moment_s < REMEMBERED_S


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
