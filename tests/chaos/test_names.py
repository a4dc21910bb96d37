"""The watch over hard names notices what is lost, and only that."""

from tests.chaos.names import Watch


def test_chunks_of_a_hard_name_may_only_become_more() -> None:
    held = {"a": 3}
    watch = Watch(lambda: held)
    for count in (3, 5, 5):
        held = {"a": count}
        watch.look()
    assert watch.lost == 0
    held = {"a": 4}
    watch.look()
    watch.look()
    assert watch.lost == 1


def test_what_is_no_longer_kept_or_computed_by_other_weights_is_not_lost() -> None:
    held = {"a": 3, "b": 2}
    watch = Watch(lambda: held)
    watch.look()
    held = {"b": 2}
    watch.look()
    watch.reset()
    held = {"b": 0}
    watch.look()
    assert watch.lost == 0
