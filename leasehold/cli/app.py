"""All commands. Each imports what it needs when it is run, so that the help is printed at once."""

from typing import Annotated

import typer

from leasehold.cli import importing, limits, services, up, verify
from leasehold.cli.customers import block, override, reset, subscription
from leasehold.cli.deciding import check, decisions
from leasehold.cli.finance import usage
from leasehold.cli.finance.accounting import adjustment, period
from leasehold.cli.finance.ledger import ledger
from leasehold.cli.finance.statements import statement
from leasehold.cli.finance.suspense import quarantine, suspense
from leasehold.cli.finance.tenants import tenant
from leasehold.cli.limits import quota
from leasehold.cli.operations import doctor, envoy, regions
from leasehold.cli.operations.lanes import lane
from leasehold.cli.operations.rebalance import rebalance
from leasehold.cli.operations.regions import region
from leasehold.cli.tokens import token
from leasehold.cli.webhooks import installation, webhook
from protocol.compatibility.releases import RELEASE

# Pretty tracebacks would print local variables, and with them secrets.
app = typer.Typer(
    name="leasehold",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_release(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(RELEASE)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_release, is_eager=True, help="Print the release.")
    ] = False,
) -> None:
    """A multi-region quota coordinator with a reservation protocol.

    Exit status: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted. Commands that print data have --json.
    """


for module in (up, services, doctor, verify, limits, check, decisions, usage, regions, envoy):
    app.add_typer(module.commands)
app.add_typer(quota, name="quota")
app.add_typer(importing.commands, name="import")
app.add_typer(subscription, name="subscription")
app.add_typer(override, name="override")
app.add_typer(reset, name="reset")
app.add_typer(block, name="block")
app.add_typer(region, name="region")
app.add_typer(lane, name="lane")
app.add_typer(rebalance, name="rebalance")
app.add_typer(tenant, name="tenant")
app.add_typer(statement, name="statement")
app.add_typer(period, name="period")
app.add_typer(adjustment, name="adjustment")
app.add_typer(suspense, name="suspense")
app.add_typer(quarantine, name="quarantine")
app.add_typer(ledger, name="ledger")
app.add_typer(webhook, name="webhook")
app.add_typer(token, name="token")
app.add_typer(installation, name="installation")
