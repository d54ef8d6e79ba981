"""`./dev hostile --minutes N` attacks a stack under honest load, and prints what that cost.

A region attacks the coordinator with its valid token, and a local program attacks an agent.
"""

import argparse
import asyncio
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.pieces import Stack
from tests.hostile.trial import ATTACKERS, report, trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long it attacks (default: 1)")
    parser.add_argument("--attacker", choices=ATTACKERS, action="append", help="who attacks (default: both)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with TemporaryDirectory() as directory:
        stack = Stack(Path(directory))
        try:
            stack.begin()
            verdict = asyncio.run(trial(stack, options.attacker or ATTACKERS, options.minutes * 60, options.seed))
        finally:
            stack.end()
    print(report(verdict))
    return 1 if verdict.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
