"""Who fails again and again waits longer each time."""

from xinference_xavier.runtime.backoff import Backoff


def test_each_pause_is_twice_as_long_until_the_longest() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.pause() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert [backoff.pause() for _ in range(2)] == [1.0, 2.0]


def test_jitter_shortens_a_pause_to_half_of_it_at_most() -> None:
    pauses = {Backoff(1.0, 5.0, jitter=True).pause() for _ in range(100)}
    assert len(pauses) > 1
    assert 0.5 <= min(pauses) <= max(pauses) <= 1.0
