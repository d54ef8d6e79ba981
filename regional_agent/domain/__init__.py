"""Pure decisions of the agent: no clock, no network, no store."""
