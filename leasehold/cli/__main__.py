"""`python -m leasehold.cli`, for where the script is not on the path."""

from leasehold.cli import main

main()
