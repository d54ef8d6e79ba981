"""The command line. `leasehold.cli.app` has the commands."""

import sys


def main() -> None:
    """Run the command line, or say which packages are missing in an installation that has the client only."""
    try:
        from leasehold.cli.app import app

        app()
    except ModuleNotFoundError as error:
        sys.exit(f"leasehold: {error.name} is not installed. Run: pip install 'leasehold[server]'")
