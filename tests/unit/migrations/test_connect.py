"""A URL of several hosts is one URL for each of them, and accepts primaries only."""

import pytest

from migrations.connect import urls_of_hosts


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:p%40@h/db", {"h": "postgresql://u:p%40@h/db"}),
        ("postgresql://h/db?target_session_attrs=any", {"h": "postgresql://h/db?target_session_attrs=any"}),
        (
            "postgresql://u:p%40@h1:5433,h2/db?sslmode=verify-full",
            {
                "h1:5433": "postgresql://u:p%40@h1:5433/db?sslmode=verify-full&target_session_attrs=read-write",
                "h2": "postgresql://u:p%40@h2/db?sslmode=verify-full&target_session_attrs=read-write",
            },
        ),
        (
            "postgresql://u@/db?host=/run/a,h2&port=1,2&target_session_attrs=primary",
            {
                "/run/a": "postgresql://u@/db?target_session_attrs=primary&host=%2Frun%2Fa&port=1",
                "h2": "postgresql://u@/db?target_session_attrs=primary&host=h2&port=2",
            },
        ),
        (
            "postgresql://[::1]:5432,h2/db",
            {
                "[::1]:5432": "postgresql://[::1]:5432/db?target_session_attrs=read-write",
                "h2": "postgresql://h2/db?target_session_attrs=read-write",
            },
        ),
    ],
)
def test_each_host_has_a_url(url: str, expected: dict[str, str]) -> None:
    assert dict(urls_of_hosts(url)) == expected


@pytest.mark.parametrize("attribute", ["standby", "read-only", "prefer-standby"])
def test_a_standby_is_not_asked_for(attribute: str) -> None:
    with pytest.raises(ValueError, match=f"must be read-write or primary, not {attribute}: Leasehold writes"):
        list(urls_of_hosts(f"postgresql://u:secret@h/db?target_session_attrs={attribute}"))


def test_of_several_hosts_not_any_will_do() -> None:
    with pytest.raises(ValueError, match="not any"):
        list(urls_of_hosts("postgresql://h1,h2/db?target_session_attrs=any"))
