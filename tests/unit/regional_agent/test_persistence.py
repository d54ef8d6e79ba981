"""How long a reply is waited for, and when the same is said again."""

from regional_agent.leasing.rules.persistence import FIRST_PAUSE_MS, LONGEST_PAUSE_MS, Persistence


def test_it_is_said_again_ever_later_counted_from_when_it_was_said() -> None:
    persistence, moments = Persistence(), []
    for _ in range(6):
        persistence.failed(1_000)
        moments.append(persistence.again_at_ms - 1_000)
    assert moments == [400, 800, 1600, 3200, LONGEST_PAUSE_MS, LONGEST_PAUSE_MS]


def test_a_success_begins_anew() -> None:
    persistence = Persistence()
    persistence.failed(1_000)
    persistence.succeeded()
    assert (persistence.pause_ms, persistence.again_at_ms) == (0, 0)
    assert persistence.reply_within_ms(0) == FIRST_PAUSE_MS


def test_a_reply_is_waited_for_longer_where_they_take_long_and_after_each_one_that_did_not_come() -> None:
    persistence = Persistence()
    assert [persistence.reply_within_ms(rtt) for rtt in (80, 300, 4_000)] == [400, 600, LONGEST_PAUSE_MS]
    persistence.failed(0)
    assert persistence.reply_within_ms(80) == 800
    assert Persistence(LONGEST_PAUSE_MS).reply_within_ms(0) == LONGEST_PAUSE_MS
