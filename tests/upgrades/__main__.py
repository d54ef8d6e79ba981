"""`./dev upgrades --rounds N` rolls a stack to this release and back again, and prints the balance sheet."""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.balance import sheet
from tests.upgrades.mixed_stack import MixedStack
from tests.upgrades.rolling import roll
from tools.parts import fetch


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev upgrades", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="how often it is rolled forward and back (default: 1)")
    options = parser.parse_args()
    before = fetch("release-before") / "venv" / "bin" / "python"
    with TemporaryDirectory() as directory:
        stack = MixedStack(Path(directory), before)
        try:
            stack.begin()
            rolled = roll(stack, options.rounds)
        finally:
            stack.end()
    print(sheet(rolled.lines, rolled.journal, rolled.done))
    for pair, found in rolled.tried.items():
        print(f"{pair}: " + ", ".join(f"{direction} {fault or 'works'}" for direction, fault in found.items()))
    for order, sentence in rolled.refused.items():
        print(f"{order}: {' '.join(sentence.split())}")
    faults = rolled.faults()
    print("\n".join(faults) or "every request was answered, and each unit is booked once")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
