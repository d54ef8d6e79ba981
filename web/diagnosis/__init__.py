"""How a service examines itself, and which release it is."""
