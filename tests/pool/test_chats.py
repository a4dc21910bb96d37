"""What chats find of their history in a full pool, with reasoning in their answers and without.

Most chat templates leave reasoning out of the next prompt. Then all that was generated is of no
use, the answer behind the reasoning included: its keys depend on all tokens before it.
"""

import random
from collections.abc import Iterator, Sequence

import pytest

from xinference_xavier.pool.pool import Pool

SLOTS = 450
CHATS = 12
"""At a time."""
FIRST, QUESTION, ANSWER, REASONING = 10, 2, 3, 30
"""Chunks."""


class Chats:
    """Each turn of a chat asks with all questions and answers before it. Three chats at a time
    are being answered, and some chats end in each round, for which new ones begin.

    If the pool is not `told` what was generated, it cannot tell it from prompts.
    """

    def __init__(self, reasoning: int, told: bool = True, stored: bool = True) -> None:
        self.pool = Pool(SLOTS)
        self._found = self._asked = self._turns = self._whole = 0
        self._reasoning, self._told, self._stored = reasoning, told, stored
        rng, names, new = random.Random(1), [*range(CHATS)], CHATS
        answering: list[Iterator[None]] = []
        length = dict.fromkeys(names, FIRST)
        for _ in range(12):
            for chat in rng.sample(names, CHATS):
                answering.append(self._turn(b"%d" % chat, length[chat]))
                length[chat] += QUESTION + ANSWER
                while len(answering) > 2:
                    answering = [turn for turn in answering if next(turn, turn) is None]
            for chat in rng.sample(names, CHATS // 6):
                names[names.index(chat)] = new
                length[new], new = FIRST, new + 1

    @property
    def kept(self) -> float:
        """The share of the history that later turns find."""
        return self._found / self._asked

    @property
    def answers_kept(self) -> float:
        """The share of later turns that find all, up to the latest answer."""
        return self._whole / self._turns

    def _turn(self, chat: bytes, length: int) -> Iterator[None]:
        """It is answered a chunk at a time."""
        prompt = [b"%b-%d" % (chat, place) for place in range(length)]
        answer = [b"%b-%d" % (chat, length + place) for place in range(ANSWER)]
        if self._reasoning:
            count = self._reasoning + ANSWER
            answer = [b"%b-%d-%d" % (chat, length, place) for place in range(count)]
        if length > FIRST:  # a later turn
            lost = (place for place, key in enumerate(prompt) if self.pool.lookup(key) is None)
            found, history = next(lost, length), length - QUESTION
            self._found, self._asked = self._found + found, self._asked + history
            self._whole, self._turns = self._whole + (found >= history), self._turns + 1
        self.pool.end_probation(prompt)
        self._store(prompt, prompt, generated=False)
        for place in range(len(answer) if self._stored else 0):
            yield
            self._store([answer[place]], [*prompt, *answer[: place + 1]], generated=self._told)
        self.pool.touch(reversed(prompt + answer))

    def _store(self, keys: Sequence[bytes], prefix: Sequence[bytes], generated: bool) -> None:
        for row in self.pool.reserve(keys, prefix).rows:
            row.probation = generated
            self.pool.commit(row)
            assert self.pool.pin_row(row), "its checksum is computed"
            self.pool.unpin([row])


def test_generated_reasoning_pushes_out_no_history() -> None:
    kept = Chats(REASONING).kept
    assert kept > 0.95 * Chats(REASONING, stored=False).kept
    assert kept > 2 * Chats(REASONING, told=False).kept


def test_answers_that_come_back_are_kept_like_prompts() -> None:
    """The pool is full of chats that have ended. They go first, though they were looked up."""
    chats, before = Chats(reasoning=0), Chats(reasoning=0, told=False)
    assert chats.kept > 0.95 * before.kept
    assert chats.answers_kept > 0.95 * before.answers_kept


@pytest.mark.parametrize("shared", [False, True], ids=["for a request", "for a peer"])
def test_what_was_needed_once_is_kept_like_prompts(shared: bool) -> None:
    pool = Pool(4)
    for key in (b"a", b"b", b"c", b"d"):
        (row,) = pool.reserve([key]).rows
        row.probation = key in (b"b", b"c")
        pool.commit(row, checksum=1)
    if shared:
        pool.unpin(pool.pin_shared([b"b"]))
    else:
        pool.end_probation([b"b"])
    evicted = [pool.reserve([key], [key]).evicted for key in (b"w", b"x", b"y")]
    assert evicted == [[b"c"], [b"a"], [b"d"]]
