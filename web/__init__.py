"""HTTP code that both services share: problems, bodies, OpenAPI, limits, request ids, logs, metrics and serving."""
