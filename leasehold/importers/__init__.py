"""Turn the configurations of other rate limiters into limits documents."""
