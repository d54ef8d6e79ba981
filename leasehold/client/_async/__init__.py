"""The client for event loops, and the source of `leasehold/client/_sync`."""
