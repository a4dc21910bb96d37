"""A replica tells peers that start what its latest requests used most: whole prefixes, the most
important ones first."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from xinference_xavier.pool.pool import Pool
from xinference_xavier.replica import warm_join as module
from xinference_xavier.replica.warm_join import RecentPrompts

SLOTS = 64
OTHER_GROUP = 1


def key(letter: str, group: int = 0) -> bytes:
    return letter.encode() + group.to_bytes(4, "big")


def prompt(letters: str) -> list[bytes]:
    return [key(letter) for letter in letters]


class Scene:
    def __init__(self) -> None:
        self.pool = Pool(SLOTS)
        self.finished: list[list[bytes]] = []
        self.named: list[list[bytes]] = []
        self.recent = RecentPrompts(self.pool, self.take, lambda: self.named)

    def take(self) -> list[list[bytes]]:
        finished, self.finished = self.finished, []
        return finished

    def hold(self, keys: list[bytes]) -> None:
        for row in self.pool.reserve(keys).rows:
            self.pool.commit(row, checksum=1)

    def ask(self, *prompts: str) -> None:
        for letters in prompts:
            self.hold(prompt(letters))
            self.finished.append(prompt(letters))

    def hottest(self, most: int = SLOTS) -> str:
        keys = self.recent.hottest(most).keys
        return "".join(chr(keys[place]) for place in range(0, len(keys), 5))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_what_most_requests_began_with_comes_first(scene: Scene) -> None:
    scene.ask("abc", "xy", "abd", "xy", "ae")
    assert scene.hottest() == "axyb", "c, d and e have been used once"
    assert scene.recent.hottest(SLOTS).uses == (3, 2, 2, 2)


def test_of_equal_ones_the_latest_comes_first(scene: Scene) -> None:
    scene.ask("ab", "ab", "xy", "xy")
    assert scene.hottest() == "xyab"
    scene.ask("ab", "xyz")
    assert scene.hottest() == "xyab"
    scene.ask("ab", "ab")
    assert scene.hottest(most=3) == "abx"


def test_named_prefixes_come_before_all_others(scene: Scene) -> None:
    scene.ask("abc", "abc", "xy")
    scene.hold(prompt("uv"))
    scene.named = [prompt("uv"), prompt("xy")]
    assert scene.hottest() == "xyuvabc"
    assert scene.recent.hottest(SLOTS).named == 4
    assert scene.recent.hottest(3).named == 3


def test_what_is_not_in_the_pool_is_not_offered_nor_what_follows_it(scene: Scene) -> None:
    scene.ask("abcd", "abcd")
    row = scene.pool.lookup(key("c"))
    scene.pool.flush([row])
    scene.named = [prompt("qr")]
    assert scene.hottest() == "ab"


def test_a_chunk_without_a_checksum_is_not_offered(scene: Scene) -> None:
    for row in scene.pool.reserve(prompt("a")).rows:
        scene.pool.commit(row)
    scene.finished = [prompt("a")] * 2
    assert scene.hottest() == ""


def test_a_group_that_looks_back_only_so_far_may_lack_its_first_chunks(scene: Scene) -> None:
    full, window = [key(each) for each in "ab"], [key(each, OTHER_GROUP) for each in "ab"]
    scene.hold([*full, window[1]])
    scene.finished = [[*full, *window]] * 2
    assert scene.hottest() == "abb"


def test_only_the_latest_requests_count(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 3)
    scene.ask("ab", "ab", "xy", "xy")
    assert scene.hottest() == "xy"


def test_memory_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 4)
    scene.ask("abcd", "xy", "xy")
    assert scene.hottest() == "xy"
    scene.ask("abcde")
    assert scene.hottest() == "", "a prompt that is too long for it is forgotten, too"


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "ab", "abc", "abd", "xy", "xyz", "q"]), max_size=12))
def test_however_it_is_cut_each_chunk_is_behind_the_one_before_it(prompts: list[str]) -> None:
    scene = Scene()
    scene.ask(*prompts)
    before = {"b": "a", "c": "b", "d": "b", "y": "x", "z": "y"}
    found = scene.hottest()
    for place, letter in enumerate(found):
        assert letter in "axq" or before[letter] in found[:place]
    for most in range(len(found)):
        assert scene.hottest(most) == found[:most]
