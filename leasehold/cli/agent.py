"""`leasehold agent`."""

from leasehold.cli.failure import run_service


def agent() -> None:
    """Run a region's agent. Its settings are environment variables that begin with LEASEHOLD_AGENT_."""
    from regional_agent.main import run

    run_service(run)
