"""Traces of requests, by OpenTelemetry; where they are off, nothing of it is loaded."""
