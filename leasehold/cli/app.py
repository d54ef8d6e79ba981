"""The command line: one file per noun. Each imports what it needs when it is called, so that help is there at once."""

import typer

from leasehold.cli.adjustment import adjustment
from leasehold.cli.agent import agent
from leasehold.cli.allocations import allocations
from leasehold.cli.apply import apply
from leasehold.cli.block import block
from leasehold.cli.coordinator import coordinator
from leasehold.cli.env import env
from leasehold.cli.export import export
from leasehold.cli.installation import installation
from leasehold.cli.migrate import migrate
from leasehold.cli.override import override
from leasehold.cli.period import period
from leasehold.cli.quota import quota
from leasehold.cli.rates import rates, slots
from leasehold.cli.rebalance import rebalance
from leasehold.cli.region import region
from leasehold.cli.statement import statement
from leasehold.cli.subscription import subscription
from leasehold.cli.token import token
from leasehold.cli.up import up
from leasehold.cli.usage import usage
from leasehold.cli.verify import verify
from leasehold.cli.webhook import webhook

# Pretty tracebacks would print local variables, and with them secrets.
app = typer.Typer(
    name="leasehold",
    help="A multi-region quota coordinator with a reservation protocol.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(up)
app.command()(env)
app.command()(coordinator)
app.command()(agent)
app.command()(migrate)
app.command()(verify)
app.command()(apply)
app.command()(usage)
app.command()(statement)
app.command()(export)
app.command()(allocations)
app.command()(rates)
app.command()(slots)
app.add_typer(quota, name="quota")
app.add_typer(subscription, name="subscription")
app.add_typer(override, name="override")
app.add_typer(block, name="block")
app.add_typer(region, name="region")
app.add_typer(rebalance, name="rebalance")
app.add_typer(period, name="period")
app.add_typer(adjustment, name="adjustment")
app.add_typer(webhook, name="webhook")
app.add_typer(token, name="token")
app.add_typer(installation, name="installation")
