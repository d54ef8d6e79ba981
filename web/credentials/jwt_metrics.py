"""The metrics of JWTs, the same in both services."""

from web.declared_metrics import DeclaredMetrics, counter, gauge


class JwtMetrics(DeclaredMetrics):
    verified = counter("leasehold_jwt_verified", "Signatures of JWTs verified. Known JWTs need none.")
    refused = counter("leasehold_jwt_refused", "JWTs refused, by reason.", "reason")
    fetches = counter("leasehold_jwt_key_fetches", "Fetches of the JWT issuer's keys, by result.", "result")
    fetched_at = gauge("leasehold_jwt_keys_timestamp_seconds", "When the JWT issuer's keys were last fetched.")
