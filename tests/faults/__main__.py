"""`./dev faults` makes every fault of docs/guides/health.md in a real region, and prints what the services report."""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.scene import Scene
from tests.faults.table import FAULTS
from tests.faults.trial import run, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev faults", description=__doc__)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", choices=names, action="append", help="this fault (default: all)")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if fault.name in (options.only or names)]
    records = []
    with TemporaryDirectory() as directory:
        scene = Scene.prepare(Path(directory))
        try:
            scene.begin()
            for record in run(scene, chosen):
                print(
                    f"{record.fault.name}: also logged: {'; '.join(record.other_events) or 'nothing'}", file=sys.stderr
                )
                records.append(record)
        finally:
            scene.end()
            print(table(records))
    mismatches = [each for record in records for each in record.mismatches()]
    print("\n".join(mismatches), file=sys.stderr)
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
