"""A command refuses a field that is given twice, because it could send only one of the values."""

import shlex

import pytest
from typer.testing import CliRunner

from leasehold.cli.app import app

COMMANDS = (
    "check tenant=acme tenant=globex",
    "check labels.model=large labels.model=small",
    "override create exports 5 --for tenant=acme --for tenant=globex --reason sale",
    "reset create logins --for user=jane --for user=joe --reason called",
    "tenant set acme --name Acme --external-id stripe=cus_1 --external-id stripe=cus_2",
    "rebalance weigh exports us-east.floor=1 us-east.floor=2",
    "up --store us-east=redis://127.0.0.1:1 --store us-east=redis://127.0.0.1:2",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_field_that_is_given_twice_is_refused(command: str) -> None:
    done = CliRunner(env={"LEASEHOLD_TOKEN": "t"}).invoke(app, shlex.split(command))
    assert done.exit_code == 1
    assert "is given twice" in done.stderr
