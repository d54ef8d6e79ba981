"""Libraries that people use today for the same purpose, and Leasehold asked in the same way."""
