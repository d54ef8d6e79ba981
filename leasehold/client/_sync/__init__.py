# Generated from leasehold/client/_async/__init__.py by `./dev sync-client`: change that file instead.
"""The client for threads."""
