"""`leasehold coordinator`."""

from leasehold.cli.failure import run_service


def coordinator() -> None:
    """Run a coordinator. Its settings are environment variables that begin with LEASEHOLD_COORDINATOR_."""
    from coordinator.main import run

    run_service(run)
