"""Each form of a store's address, and what is refused by name; no error repeats a password."""

import pytest

from regional_agent.store.address import StoreAddress, StoreSetup


@pytest.mark.parametrize(
    ("url", "text", "has_tls"),
    [
        ("redis://:secret@store:6380/2", "store:6380/2", False),
        ("redis://store", "store:6379/0", False),
        ("rediss://user:secret@[::1]:6380", "[::1]:6380/0", True),
        ("unix:///run/redis.sock?db=1", "/run/redis.sock", False),
        ("redis+sentinel://:secret@a:1,b/main/3", "main of the sentinels a:1,b:26379", False),
        ("rediss+sentinel://a,b,c/main", "main of the sentinels a:26379,b:26379,c:26379", True),
        ("redis+cluster://:secret@a:1,[::1]:2", "a:1,[::1]:2", False),
        ("rediss+cluster://a/", "a:6379", True),
    ],
)
def test_an_address_shows_itself_without_its_password(url: str, text: str, has_tls: bool) -> None:
    address = StoreAddress.parse(url)
    assert (str(address), address.has_tls) == (text, has_tls)
    assert "secret" not in repr(address)


def test_the_parts_of_an_address() -> None:
    address = StoreAddress.parse("rediss+sentinel://us%40er:p%3Aw@a:1,b:2/main/3?sentinel_password=other")
    assert (address.setup, address.service, address.database) == (StoreSetup.SENTINEL, "main", 3)
    assert (address.username, address.password, address.sentinel_options) == ("us@er", "p:w", {"password": "other"})
    assert address.seeds == (("a", 1), ("b", 2))
    assert StoreAddress.parse("unix:///s?db=4").database == 4


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:hunter2@store?ssl=true", "the parameter ssl is not supported.*rediss://"),
        ("redis://:hunter2@store?ssl_cert_reqs=none", "the parameter ssl_cert_reqs is not supported"),
        ("rediss+cluster://:hunter2@store?tls=1", "the parameter tls is not supported"),
        ("rediss://:hunter2@store?timeout=1", "unknown parameter"),
        ("redis://:?hunter2@store", "unknown parameter|host"),
        ("redis://:hunter2#@store", "%23"),
        ("redis://:hunter2@store/one", "database is a number"),
        ("redis://:hunter2@store:hunter2", "port"),
        ("redis://:hunter2@", "no host"),
        ("redis://:hunter2@a,b", "several hosts"),
        ("redis+sentinel://:hunter2@a,b", "no service"),
        ("redis+sentinel://:hunter2@a,b/main/one", "database is a number"),
        ("redis+cluster://:hunter2@a/1", "no databases"),
        ("redis+cluster://:hunter2@a,", "no host"),
        ("unix://", "no host"),
        ("valkey://:hunter2@store", "must look like redis://"),
        ("hunter2", "must look like redis://"),
    ],
)
def test_what_is_wrong_with_an_address_is_said_without_repeating_it(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        StoreAddress.parse(url)
    assert "hunter2" not in str(raised.value)
