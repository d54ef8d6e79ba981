"""A program that checks with its region's agent before it works. The address of the agent is its only argument.

python examples/worker.py http://127.0.0.1:8411
"""

import sys

from leasehold import Client, Denied

EXPORT = {"tenant": "acme", "route": "/v1/exports", "method": "POST"}


def main(url: str) -> None:
    with Client(url, on_failure="closed") as client:
        decision = client.check(EXPORT, operation_id="export-of-today")
        print("allowed" if decision.allowed else f"denied by {decision.denied_by}", decision.headers)

        @client.limited(lambda tenant: EXPORT | {"tenant": tenant}, cost=2)
        def make_export(tenant: str) -> str:
            return f"exported for {tenant}"

        try:
            print(make_export("acme"))
        except Denied as denied:
            print(denied)

        @client.in_slot(lambda tenant: {"tenant": tenant, "route": "/v1/reports", "method": "POST"})
        def make_report(tenant: str) -> str:
            return f"reported for {tenant}, as one of few at once"

        print(make_report("acme"))

        patient = client.wait(EXPORT, timeout_s=5)
        print("after waiting:", "allowed" if patient.allowed else "denied")


if __name__ == "__main__":
    main(*sys.argv[1:])
