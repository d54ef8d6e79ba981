"""The W3C trace context."""
