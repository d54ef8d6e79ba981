"""`leasehold doctor`: the checks of every part of an installation, run from an operator's machine."""
