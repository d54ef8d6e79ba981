"""How long a poll lasts: what its client prefers, within bounds, and until a moment that all polls have in common."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.http.polling import DEFAULT_POLL_S, MAX_POLL_S, preferred_s, rest_of_poll_s


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        ("wait=50", 50),
        ("respond-async, Wait=7; x=1", 7),
        ("wait=0", 1),
        ("wait=999999", MAX_POLL_S),
        ("", DEFAULT_POLL_S),
        ("wait=soon", DEFAULT_POLL_S),
        ("await=3", DEFAULT_POLL_S),
        ("wait=9999999", DEFAULT_POLL_S),
    ],
)
def test_a_client_says_how_long_it_waits(prefer: str, seconds: int) -> None:
    assert preferred_s(prefer) == seconds


@given(began_s=st.floats(0, 1e9), later_s=st.floats(0, 24))
def test_polls_that_begin_within_half_a_poll_end_together(began_s: float, later_s: float) -> None:
    began_s -= began_s % 25
    ends = [each + rest_of_poll_s(each, 50) for each in (began_s, began_s + later_s)]
    assert ends[0] == pytest.approx(ends[1])
    assert 25 <= rest_of_poll_s(began_s + later_s, 50) <= 50
