# Generated from leasehold/client/_async/client.py by `./dev sync-client`: change that file instead.
"""The client: each method sends what `AgentProtocol` decides, and returns what it makes of the answers."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from leasehold.client._sync.limiter import DEFAULT_TTL_MS, Limiter
from leasehold.client._sync.pool import ConnectionPool
from leasehold.client.agent_protocol import (
    AgentProtocol,
    AgentUnavailable,
    Call,
    Costs,
    Decision,
    Explanation,
    HeldUnits,
    OnFailure,
    RequestRejected,
    Response,
    Steps,
    Subject,
    next_step,
    refuse_unusable,
)
from leasehold.client.http1 import FileName, Timeouts, parse_url
from leasehold.client.tokens import Token
from protocol.check import Mode
from protocol.circuit_breaker import CircuitBreaker

DEFAULT_URL = "http://127.0.0.1:8411"
LONGEST_WAIT_MS = 60_000

T = TypeVar("T")


class Client(Limiter):
    """A client of one agent. Any number of callers may share it.

    `url` is `http://host:port`, `https://host:port` or `unix:///path/of/a/socket`. For https, `ca_file` has the
    certificates to trust (without it, those of the machine), and `certificate` names the files of the client's own
    certificate and key, if the agent asks for one.

    `token` is a text, or one that changes: a `Path` of a file, which is read again within a second, or a function that
    is called for each request and must not block. If the function raises, `on_failure` answers.

    An agent that gives no sign of life for `timeout_ms` is unavailable, and `on_failure` answers. While the agent is
    alive a call waits for its answer, as a policy's `wait` asks for, up to `longest_wait_ms`.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: Token | None = None,
        ca_file: FileName | None = None,
        certificate: tuple[FileName, FileName] | None = None,
        timeout_ms: int = 1000,
        longest_wait_ms: int = LONGEST_WAIT_MS,
        connections: int = 32,
        on_failure: OnFailure = "closed",
        breaker: CircuitBreaker | None = None,
    ) -> None:
        refuse_unusable(on_failure, timeout_ms=timeout_ms, longest_wait_ms=longest_wait_ms, connections=connections)
        self._protocol = AgentProtocol(url, on_failure, breaker or CircuitBreaker(), self._now_s)
        timeouts = Timeouts(timeout_ms / 1000, max(timeout_ms, longest_wait_ms) / 1000)
        self._pool = ConnectionPool(parse_url(url, ca_file, certificate), token, timeouts, connections)

    def check(
        self,
        subject: Subject,
        *,
        cost: int | None = None,
        costs: Costs | None = None,
        operation_id: str | None = None,
        mode: Mode = "enforce",
    ) -> Decision:
        """Decide whether a request may happen now, and consume its cost if it may.

        `costs` has the units of each quota that it names; for others `cost` holds, or what their policy says.
        """
        return self._run(self._protocol.check(subject, cost=cost, costs=costs, operation_id=operation_id, mode=mode))

    def check_batch(self, checks: Sequence[Mapping[str, Any]]) -> list[Decision | RequestRejected]:
        """Decide up to 1,000 checks in one call, each as it would be in a call of its own (`POST /v1/check:batch`).

        If the agent rejects one check, its place in the result has the `RequestRejected`, which is not raised: others
        may have been charged, and the caller has to see them.
        """
        return self._run(self._protocol.check_batch(checks))

    def explain(self, subject: Subject, *, cost: int | None = None, costs: Costs | None = None) -> Explanation:
        """Tell for every policy whether it matches a request and, if not, why (`POST /v1/explain`). Consume nothing.

        AgentUnavailable is raised whatever `on_failure` says.
        """
        return self._run(self._protocol.explain(subject, cost=cost, costs=costs))

    def hold(
        self,
        subject: Subject,
        *,
        units: int | None = None,
        costs: Costs | None = None,
        ttl_ms: int = DEFAULT_TTL_MS,
        operation_id: str,
    ) -> HeldUnits:
        """Reserve units for work whose cost is not known yet. Raise Denied if there are not enough."""
        return self._run(
            self._protocol.hold(subject, units=units, costs=costs, ttl_ms=ttl_ms, operation_id=operation_id)
        )

    def commit(self, hold: HeldUnits, units: int | None = None, *, costs: Costs | None = None) -> None:
        """Consume units of a hold and release the rest. Repeating it changes nothing; another number is rejected.

        Of quotas that `costs` does not name, `units` are consumed, or all that is held.
        """
        self._run(self._protocol.commit(hold, units, costs))

    def extend(self, hold: HeldUnits, ttl_ms: int) -> None:
        """Let a hold last at least `ttl_ms` from now on; a slot lasts at most as long as its quota says."""
        self._run(self._protocol.extend(hold, ttl_ms))

    def release(self, hold: HeldUnits) -> None:
        """Give all units of a hold back."""
        self._run(self._protocol.release(hold))

    def _run(self, steps: Steps[T]) -> T:
        result: Response | AgentUnavailable | None = None
        try:
            while True:
                result = self._call(next_step(steps, result))
        except StopIteration as end:
            value: T = end.value
            return value

    def _call(self, call: Call) -> Response | AgentUnavailable:
        try:
            return self._pool.call(call)
        except AgentUnavailable as error:
            return error

    def close(self) -> None:
        """Close the connections that are not in use. A closed client may be used again."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
