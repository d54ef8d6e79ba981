"""Replicas confirm writes by their offsets, each by its own, as long as no link to a replica is made."""

import pytest

from regional_agent.store.durability import InReplicas, Link, SharedHistory, read_links, shared_history

NEAR, FAR = Link("10.0.0.2", 6379), Link("fd00::3", 6380)


def info(offset: int, *replicas: str, made: str = "2.0") -> bytes:
    lines = [f"slave{number}:{each},lag=0" for number, each in enumerate(replicas)]
    full, partial = made.split(".")
    counters = [f"master_repl_offset:{offset}", f"sync_full:{full}", f"sync_partial_ok:{partial}"]
    return "\r\n".join(["# Replication", "role:master", *lines, *counters]).encode()


def at(link: Link, offset: int, state: str = "online") -> str:
    return f"ip={link.host},port={link.port},state={state},offset={offset}"


@pytest.mark.parametrize(
    ("acknowledged", "is_confirmed"),
    [
        (info(120, at(NEAR, 100), at(FAR, 120)), True),
        (info(120, at(NEAR, 99), at(FAR, 120)), False),
        (info(120, at(NEAR, 100)), False),
        (info(120, at(NEAR, 100), at(FAR._replace(port=6381), 120)), False),
        (info(120, at(NEAR, 100), at(FAR, 120, "wait_bgsave")), False),
        (info(120, at(NEAR, 120), at(FAR, 120), made="2.1"), False),
        (info(120, at(NEAR, 120), at(FAR, 120), made="3.0"), False),
        (info(120, at(NEAR, 120), at(FAR, 120), at(NEAR, 120)), False),
        (info(120, at(NEAR, 120), at(FAR, 120), at(NEAR, 120, "send_bulk")), False),
        (info(120), False),
        (b"", False),
        (ValueError("no answer"), False),
    ],
)
def test_each_replica_has_to_acknowledge_the_writes(acknowledged: bytes | Exception, is_confirmed: bool) -> None:
    durability = InReplicas([NEAR, FAR], "2.0", b"key")
    assert durability.is_confirmed([info(100), b"OK", 2, acknowledged]) is is_confirmed
    assert durability.confirmed_offset == (100 if is_confirmed else 0)


def test_an_unreadable_offset_confirms_nothing() -> None:
    for written in (b"role:master", ConnectionError("gone")):
        assert not InReplicas([NEAR], "2.0", b"key").is_confirmed([written, b"OK", 1, info(9, at(NEAR, 9))])


def test_only_a_promoted_store_has_a_shared_history() -> None:
    promoted = b"role:master\r\nmaster_replid2:old\r\nsecond_repl_offset:701"
    assert shared_history(promoted) == SharedHistory("old", 700)
    assert shared_history(promoted.replace(b"master\r", b"slave\r")) is None
    assert shared_history(b"role:master\r\nmaster_replid2:" + b"0" * 40 + b"\r\nsecond_repl_offset:-1") is None
    assert shared_history(b"role:master") is None


def test_links_are_read_as_a_store_lists_them() -> None:
    links = read_links(info(7, at(NEAR, 5), at(FAR, 6), made="3.1"))
    assert links == ("3.1", {NEAR: 5, FAR: 6})
