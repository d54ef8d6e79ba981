"""Real faults of networks, databases, stores, disks and memory, and what Leasehold reported and booked meanwhile."""
