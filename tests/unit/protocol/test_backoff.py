"""Back-off is exponential and bounded."""

from protocol.backoff import Backoff


def test_pauses_double_up_to_the_longest_counted_from_the_time_of_the_failure() -> None:
    backoff, pauses = Backoff(400, 5_000), []
    for _ in range(6):
        pauses.append(backoff.failed(1_000))
        assert backoff.until == 1_000 + pauses[-1]
    assert pauses == [400, 800, 1_600, 3_200, 5_000, 5_000]
    assert [backoff.pause_after(failures) for failures in range(1, 7)] == pauses


def test_a_success_resets_the_pause() -> None:
    backoff = Backoff(400, 5_000)
    backoff.failed(1_000)
    assert backoff.next_pause == 800
    backoff.succeeded()
    assert (backoff.pause, backoff.until, backoff.next_pause) == (0, 0, 400)


def test_a_bound_shortens_a_pause() -> None:
    backoff = Backoff(400, 5_000)
    assert backoff.failed(1_000, at_most=100) == 400
    assert [backoff.is_pausing(now) for now in (1_099, 1_100)] == [True, False]
