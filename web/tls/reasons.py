"""Say in words why a TLS connection failed, for health, logs and metrics.

OpenSSL names a reason by a constant. What the other side refused arrives as an alert, so the side that is at fault
often learns less than the other one: both log it.
"""

import ssl
from collections.abc import Iterator, Mapping

UNTRUSTED = (18, 19, 20, 21)  # X509_V_ERR: self-signed, or no trusted authority at the end of the chain
EXPIRED, NOT_YET_VALID = 10, 9
WRONG_NAME = (62, 64)  # of a host, or of an address

# What went wrong here, or what the other side said was wrong with our certificate.
_REASONS: Mapping[str, tuple[str, str]] = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": ("no_certificate", "the client showed no certificate"),
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": ("certificate_required", "the server requires a client certificate"),
    "TLSV1_ALERT_UNKNOWN_CA": (
        "refused_unknown_authority",
        "the other side does not trust our certificate's authority",
    ),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": ("refused_expired", "the other side says that our certificate has expired"),
    "SSLV3_ALERT_BAD_CERTIFICATE": ("refused_certificate", "the other side refuses our certificate"),
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": ("refused_certificate", "the other side refuses our certificate"),
    "SSLV3_ALERT_HANDSHAKE_FAILURE": (
        "refused_handshake",
        "the other side ended the handshake; it may require a client certificate",
    ),
    "WRONG_VERSION_NUMBER": ("not_tls", "the other side does not speak TLS"),
    "HTTP_REQUEST": ("not_tls", "the client sent plain HTTP"),
}


def tls_error_in(error: BaseException) -> ssl.SSLError | None:
    """Return the TLS library's error behind another one, if there is any."""
    return next((each for each in _chain(error) if isinstance(each, ssl.SSLError)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):  # a chain may lead back to itself
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def code_of(error: ssl.SSLError) -> str:
    """Return a short name of the reason, for a metric's label."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in UNTRUSTED:
            return "untrusted_authority"
        names = {EXPIRED: "expired", NOT_YET_VALID: "not_yet_valid"} | dict.fromkeys(WRONG_NAME, "wrong_name")
        return names.get(error.verify_code, "certificate_invalid")
    return _REASONS.get(_constant(error), ("other", ""))[0]


def describe(error: ssl.SSLError) -> str:
    """Return the reason as a clause, such as `its certificate has expired`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _describe_verification(error)
    known = _REASONS.get(_constant(error))
    return known[1] if known else f"TLS failed: {_constant(error) or error}"


def _constant(error: ssl.SSLError) -> str:
    """Return OpenSSL's name of the reason. Errors that do not come from OpenSSL have none."""
    return getattr(error, "reason", None) or ""


def _describe_verification(error: ssl.SSLCertVerificationError) -> str:
    message = error.verify_message.rstrip(".")
    if error.verify_code in UNTRUSTED:
        return f"its certificate is not signed by a trusted authority ({message})"
    if error.verify_code == EXPIRED:
        return "its certificate has expired"
    if error.verify_code in WRONG_NAME:
        return f"its certificate is for another name ({message})"
    return f"its certificate is invalid ({message})"
