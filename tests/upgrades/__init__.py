"""This release beside the one before, as real processes: each pair of them, and a rolling upgrade under load."""
