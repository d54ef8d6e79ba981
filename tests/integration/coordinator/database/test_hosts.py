"""One of several hosts that is dead or silent leaves the others their part of the time."""

import asyncio

import pytest

from coordinator.database.engine import connect
from migrations.connect import NoUsableHost
from tests.conftest import free_port
from tests.waiting import BOUND_S

pytestmark = pytest.mark.anyio


async def test_a_host_that_never_answers_leaves_the_others_their_time(database: str) -> None:
    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1_000):
            pass
        writer.close()

    async with await asyncio.start_server(stay_silent, "127.0.0.1", 0) as silent, asyncio.timeout(BOUND_S):
        port = silent.sockets[0].getsockname()[1]
        url = database.replace("@", f"@127.0.0.1:{port},")
        connection = await connect(url, timeout_s=4)
        assert await connection.fetchval("SELECT pg_is_in_recovery()") is False
        connection.terminate()


async def test_each_host_has_its_reason() -> None:
    first, second = free_port(), free_port()
    with pytest.raises(NoUsableHost) as refused:
        await connect(f"postgresql://u:secret@127.0.0.1:{first},127.0.0.1:{second}/db")
    assert str(refused.value).startswith(f"no host of the database can be used: 127.0.0.1:{first}: ")
    assert f"; 127.0.0.1:{second}: " in str(refused.value)
    assert "secret" not in str(refused.value)
