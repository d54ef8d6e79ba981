"""Run examples/push_usage.py again and again, each time killed `stride` lines later, until one run is not killed.

A process of its own, which forks one for each run. The kill is SIGKILL: no `finally` runs, and nothing is flushed.
"""

import os
import runpy
import signal
import sys
from types import FrameType
from typing import Any

import httpx  # imported once, before the forks


def die_at(line: int, program: str) -> None:
    """Kill this process when it is about to execute the n-th line in a function of the program."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != program or frame.f_code.co_name == "<module>":
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def main() -> None:
    assert httpx
    program, reset, stride, *words = sys.argv[1:]
    killed = 0
    while True:
        if reset == "restart" and os.path.exists(words[-1]):
            os.unlink(words[-1])
        child = os.fork()
        if child == 0:
            sys.argv = [program, *words]
            die_at(1 + killed * int(stride), program)
            runpy.run_path(program, run_name="__main__")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            print("killed", killed, "exit", os.waitstatus_to_exitcode(status))  # noqa: T201
            return
        killed += 1


main()
