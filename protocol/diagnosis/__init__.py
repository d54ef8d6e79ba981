"""Checks of a running installation, and how a rule judges facts."""
