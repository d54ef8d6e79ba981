"""The contract between regions and the coordinator.

It knows no role and does no input or output: both sides import it, and it imports neither.
"""
