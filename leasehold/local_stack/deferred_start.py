"""Run a service as soon as a line arrives on standard input; everything is imported before.

    python -m leasehold.local_stack.deferred_start coordinator|agent

If standard input ends without a line, the launcher is gone, and the service does not start.
"""

import sys
from collections.abc import Callable


def imported_service(name: str) -> Callable[[], None]:
    if name == "coordinator":
        from coordinator.main import run as run_coordinator  # noqa: PLC0415 - takes long, and an agent does not need it

        return run_coordinator
    from regional_agent.main import run as run_agent  # noqa: PLC0415 - see above

    return run_agent


if __name__ == "__main__":
    run = imported_service(sys.argv[1])
    if sys.stdin.readline():
        run()
