"""What the web of both services share: problem documents, bodies, limits, request ids, logs, settings, serving."""
