"""The coordinator as agents meet it."""
