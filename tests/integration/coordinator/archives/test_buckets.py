"""Archives in a bucket of a real server of the S3 protocol, read back by a coordinator and by the command line."""

import asyncio
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.archives.check import check_archive
from coordinator.archives.store import ArchiveStore
from leasehold.local_stack.processes import stop, wait_until
from tests.integration.coordinator.archives.conftest import archivist_on
from tests.integration.coordinator.archives.test_archives import answers, is_intact
from tests.integration.coordinator.proof.history import NOVEMBER

pytestmark = pytest.mark.anyio
START_S = 60


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the location of an empty bucket."""
    key, secret = secrets.token_hex(8), secrets.token_hex(16)
    (tmp_path / "served" / "ledger").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rclone = str(Path(sys.executable).with_name("rclone"))
    serve = [rclone, "serve", "s3", str(tmp_path / "served"), "--addr", f"127.0.0.1:{port}"]
    server = subprocess.Popen([*serve, "--auth-key", f"{key},{secret}", "--config", "", "--vfs-cache-mode", "off"])
    try:
        assert wait_until(lambda: _answers(port), START_S)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")  # as the guide says
        yield f"s3://ledger/production?scheme=http&endpoint_override=127.0.0.1:{port}&region=us-east-1"
    finally:
        stop(server)


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.extended
async def test_a_bucket_has_archives_as_a_directory_does(closed_database: str, bucket: str) -> None:
    async with archivist_on(closed_database, bucket) as archivist:
        before = await answers(archivist, NOVEMBER)
        (found,) = await archivist.archive(NOVEMBER)
        assert found["failure"] is None
        assert (found["state"], found["location"]) == ("archived", f"s3://ledger/production/{NOVEMBER}/1"), found
        assert await answers(archivist, NOVEMBER) == before
        await is_intact(archivist)
    store = ArchiveStore(bucket)
    assert (await check_archive(store, f"{NOVEMBER}/1", bytes.fromhex(found["manifest_sha256"]))).intact
    status, printed = await verify_archive(bucket)
    assert (status, printed.count("intact")) == (0, 1), printed
    content = store.get(f"{NOVEMBER}/1", "transfers.parquet")
    store.put(f"{NOVEMBER}/1", "transfers.parquet", content[:-1] + b"x")
    status, printed = await verify_archive(bucket)
    assert (status, "NOT INTACT" in printed) == (1, True), printed


async def verify_archive(location: str) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "leasehold.cli", "ledger", "verify-archive", location]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, _ = await process.communicate()
    return process.returncode, printed.decode()


@pytest.mark.extended
async def test_a_bucket_that_does_not_answer_fails_the_archive(closed_database: str) -> None:
    nowhere = "s3://ledger/x?scheme=http&endpoint_override=127.0.0.1:9&region=us-east-1"
    async with archivist_on(closed_database, nowhere) as archivist:
        (found,) = await archivist.archive(NOVEMBER)
    assert found["state"] == "failed"
    assert found["failure"]
