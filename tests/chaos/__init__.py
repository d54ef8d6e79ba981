"""Processes are killed under load, and then the ledger is compared with a journal kept outside of them."""
