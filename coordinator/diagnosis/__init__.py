"""What a coordinator finds out about its database, its jobs and what the ledger has to say, and judges."""
