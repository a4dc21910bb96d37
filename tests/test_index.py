"""Who holds which chunks, as readers find it. `tests/tracker/test_journal.py` says that the indexes
of tracker and watchers agree."""

import random
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.harness.comparisons import all_holders, compared, compared_index
from xinference_xavier.index import PIECE, Index
from xinference_xavier.limits import LIMIT
from xinference_xavier.peers import Peers
from xinference_xavier.protocol.tracker import SHORT_KEY, Change, News, Update, pack

KEY, OTHER, *MORE = [b"key %08d" % number for number in range(4 * PIECE)]


def update(*news: News, revision: int = 1, snapshot: bool = False) -> Update:
    return Update(revision, "epoch", snapshot, news)


def adds(incarnation: str, sequence: int, *keys: bytes) -> Change:
    return Change(incarnation, sequence, pack(keys))


def replaces(incarnation: str, sequence: int, *keys: bytes) -> Change:
    return Change(incarnation, sequence, pack(keys), b"", True)


@pytest.fixture
def index() -> Iterator[Index[Peers]]:
    index = compared_index()
    index.apply(update(compared("a"), compared("b")))
    yield index
    index.check_integrity()


def test_a_run_ends_where_no_member_has_all_of_it(index: Index[Peers]) -> None:
    keys = MORE[:4]
    index.apply(update(adds("a", 1, *keys[:3]), adds("b", 1, *keys[:2], keys[3])))
    a, b = index.members["a"].bit, index.members["b"].bit
    assert index.usable_run(keys, -1) == (3, a)
    assert index.usable_run(keys, b) == (2, b)
    assert index.usable_run(keys[:2], -1) == (2, a | b)
    assert index.usable_run(keys[3:], ~b) == (0, ~b), "nothing is known yet of who is chosen"
    assert index.usable_run([], -1) == (0, -1)


def test_a_key_is_known_by_its_end(index: Index[Peers]) -> None:
    index.apply(update(adds("a", 1, KEY)))
    assert index.full_set(b"the rest of its hash" + KEY) == index.members["a"].bit


def test_of_two_replacements_the_last_counts(index: Index[Peers]) -> None:
    index.apply(update(replaces("a", 1, KEY), replaces("a", 2, OTHER)))
    assert (all_holders(index, KEY), all_holders(index, OTHER)) == ((), ("a",))


class TestStaleEntries:
    """A donor answered that it does not hold the key, having published up to a sequence."""

    @pytest.fixture(autouse=True)
    def _listed(self, index: Index[Peers]) -> None:
        index.apply(update(adds("a", 3, KEY), adds("b", 1, KEY)))

    @pytest.mark.parametrize(
        ("publications", "holders"),
        [
            ([], ("b",)),
            ([adds("a", 4, KEY), adds("a", 5, KEY)], ("b",)),
            ([replaces("a", 5, KEY)], ("b",)),
            ([adds("a", 6, KEY)], ("a", "b")),
            ([adds("a", 6, OTHER)], ("b",)),
        ],
        ids=["no other", "on their way before the answer", "so a snapshot", "later", "unrelated"],
    )
    def test_only_a_later_publication_revives_it(
        self, index: Index[Peers], publications: list[Change], holders: tuple[str, ...]
    ) -> None:
        index.record_stale(KEY, "a", 5)
        for publication in publications:
            index.apply(update(publication))
        assert all_holders(index, KEY) == holders

    def test_an_answer_older_than_the_index_is_not_believed(self, index: Index[Peers]) -> None:
        """The entry may be from the later publication, which will not be repeated."""
        index.apply(update(adds("a", 6, KEY)))
        index.record_stale(KEY, "a", 5)
        assert "a" in all_holders(index, KEY)

    def test_an_answer_of_one_that_has_left_changes_nothing(self, index: Index[Peers]) -> None:
        index.clear()
        index.record_stale(KEY, "a", 5)

    def test_they_are_forgotten_once_they_cannot_matter(self, index: Index[Peers]) -> None:
        index.record_stale(KEY, "a", 5)
        index.apply(update(adds("a", 6, OTHER)))
        assert not index.members["a"].stale

    def test_they_are_bounded(self, index: Index[Peers]) -> None:
        for number in range(LIMIT + 10):
            index.record_stale(b"%012d" % number, "a", 5)
        assert len(index.members["a"].stale) == LIMIT


def test_a_small_update_is_applied_at_once(index: Index[Peers]) -> None:
    """Nobody waits for a pause, and nobody sees half of it."""
    assert list(index.apply_in_pieces(update(adds("a", 1, KEY), adds("b", 1, OTHER)))) == []
    assert (all_holders(index, KEY), all_holders(index, OTHER)) == (("a",), ("b",))


def test_an_update_is_applied_in_pieces(index: Index[Peers]) -> None:
    """Between them, the scheduler gets Python's lock."""
    sizes = []
    for _ in index.apply_in_pieces(update(adds("a", 1, *MORE[: 3 * PIECE], KEY))):
        sizes.append(len(index))
    assert sizes == [PIECE, 2 * PIECE, 3 * PIECE]
    assert len(index) == 3 * PIECE + 1


def test_what_stays_is_found_at_any_time(index: Index[Peers]) -> None:
    """After a tracker was restarted, all peers send all that they hold."""
    index.apply(update(adds("a", 1, *MORE[: 2 * PIECE])))
    steps = 0
    for _ in index.apply_in_pieces(update(compared("a"), replaces("a", 2, *MORE), snapshot=True)):
        assert all(map(index.full_set, MORE[: 2 * PIECE]))
        index.check_integrity()
        steps += 1
    assert steps > 3


@pytest.mark.parametrize("steps", range(7))
def test_an_update_that_was_interrupted_is_applied_again(index: Index[Peers], steps: int) -> None:
    index.apply(update(adds("a", 1, *MORE[: 2 * PIECE]), adds("b", 1, KEY), revision=0))
    whole = update(compared("a"), replaces("a", 2, *MORE[PIECE:]), snapshot=True)
    for _ in zip(range(steps), index.apply_in_pieces(whole), strict=False):
        index.check_integrity()
    assert index.revision == 0, "the watcher asks for the same news again"
    index.apply(whole)
    assert (len(index), index.members.keys()) == (len(MORE) - PIECE, {"a"})


def test_a_key_takes_less_than_160_bytes() -> None:
    """A number of keys that fills tables least, after others have come and gone."""
    source, count = random.Random(0), 90_000
    tracemalloc.start()
    try:
        index = compared_index()
        index.apply(update(compared("a")))
        for number in range(1, 6):
            index.apply(update(replaces("a", number, source.randbytes(count * SHORT_KEY))))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / len(index) < 160
