"""What an agent finds out about its store, its settings and its way to the coordinator, and judges."""
