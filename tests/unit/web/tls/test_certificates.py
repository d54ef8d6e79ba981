"""What a service says about the certificates that it shows."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tests.certificates import DAY, Authority
from web.tls import context as context_module
from web.tls.certificates import Certificates
from web.tls.context import ReloadedContext, TlsFiles, client_context, server_context


@pytest.fixture(autouse=True)
def look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "REREAD_S", 0)


def shown(tmp_path: Path, ends_in: timedelta) -> Certificates:
    files = Authority(tmp_path).files("server", ends_in=ends_in)
    return Certificates({"http": ReloadedContext(files, server_context), "store": None}, CollectorRegistry())


@pytest.mark.parametrize(
    ("ends_in", "words"),
    [
        (30 * DAY, None),
        (timedelta(days=7, hours=1), None),
        (timedelta(days=6), "the certificate (http) ends soon: "),
        (-timedelta(hours=1), "the certificate (http) has expired: "),
    ],
)
def test_a_certificate_that_ends_soon_is_announced(tmp_path: Path, ends_in: timedelta, words: str | None) -> None:
    found = shown(tmp_path, ends_in).look(datetime.now(UTC))
    assert [each.code for each in found] == ([] if words is None else ["certificate_ends_soon"])
    assert all(words is not None and each.text.startswith(words) for each in found)


def test_a_short_life_is_measured_by_its_own_length(tmp_path: Path) -> None:
    """Certificates that are renewed each day would always end within a week."""
    certificates, now = shown(tmp_path, 10 * DAY), datetime.now(UTC)  # its life began 60 days ago
    assert not certificates.look(now)
    assert certificates.look(now + timedelta(days=3, hours=1))


def test_status_and_metric_have_the_end(tmp_path: Path) -> None:
    files = Authority(tmp_path).files("server")
    registry = CollectorRegistry()
    contexts = {
        "http": ReloadedContext(files, server_context),
        "coordinator": ReloadedContext(TlsFiles(files.ca_file), client_context),
    }
    [status] = Certificates(contexts, registry).status()
    assert (status.use, status.fault) == ("http", None)
    assert abs(status.not_after - datetime.now(UTC) - 30 * DAY) < timedelta(minutes=5)
    metric = "leasehold_certificate_not_after_timestamp_seconds"
    assert registry.get_sample_value(metric, {"use": "http"}) == status.not_after.timestamp()


def test_the_first_of_a_chain_that_ends_counts(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    short, _ = authority.issue("between", ends_in=DAY)
    files = authority.files("server")
    assert files.cert_file is not None
    files.cert_file.write_bytes(files.cert_file.read_bytes() + short.read_bytes())
    certificates = Certificates({"http": ReloadedContext(files, server_context)}, CollectorRegistry())
    [status] = certificates.status()
    assert status.not_after < datetime.now(UTC) + 2 * DAY


def test_changed_files_are_in_the_log_and_unusable_ones_in_the_findings(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.files("server")
    certificates = Certificates({"http": ReloadedContext(files, server_context)}, CollectorRegistry())
    now = datetime.now(UTC)
    with capture_logs() as logged:
        authority.issue("server")
        assert not certificates.look(now)
        assert not certificates.look(now)
    assert [(each["event"], each["use"]) for each in logged] == [("TLS files reloaded", "http")]
    assert files.key_file is not None
    files.key_file.write_text("no key")
    [found] = certificates.look(now)
    assert found.code == "certificate_not_reloaded"
    assert "changed TLS files (http) are not in use, those before them are: " in found.text
    assert certificates.status()[0].fault is not None
