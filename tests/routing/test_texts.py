"""A router learns from replicas which keys a text has, and about how many tokens."""

import pytest

from xinference_xavier.routing import texts as texts_module
from xinference_xavier.routing.texts import PIECE, Text, Texts, text_of

CHUNK = 128
DOCUMENT = "".join(f"word {number} " for number in range(2000))  # 40 pieces


@pytest.fixture
def texts() -> Texts:
    return Texts(CHUNK)


def keys(count: int, name: str = "key") -> list[bytes]:
    return [f"{name}{number}".encode().ljust(12) for number in range(count)]


def learn(texts: Texts, text: Text, tokens: int, name: str = "key") -> list[bytes]:
    known = keys(tokens // CHUNK, name)
    texts.learn(text, tokens, known)
    return known


def test_a_text_that_was_reported_has_its_keys_and_tokens(texts: Texts) -> None:
    text = text_of([DOCUMENT])
    known = learn(texts, text, 4000)
    prompt = texts.prompt(text)
    assert prompt.tokens == pytest.approx(4000, rel=0.03)
    assert list(prompt.keys) == known[: len(prompt.keys)]
    assert len(prompt.keys) >= len(known) - 1


def test_a_text_that_begins_alike_has_the_keys_as_far_as_it_does(texts: Texts) -> None:
    known = learn(texts, text_of([DOCUMENT]), 4000)
    half = DOCUMENT[: len(DOCUMENT) // 2]
    prompt = texts.prompt(text_of([half + "another end " * 200]))
    shared = [key for key in prompt.keys if key in known]
    assert shared == known[: len(shared)]
    assert 13 <= len(shared) <= 15  # of 31: half of them
    rest = prompt.keys[len(shared) :]
    assert rest
    assert not set(rest) & set(known)


def test_the_latest_report_counts(texts: Texts) -> None:
    """The replica may have another chat template, say, or an adapter that was loaded anew."""
    text = text_of([DOCUMENT])
    learn(texts, text, 4000, "old")
    known = learn(texts, text, 4000, "new")
    assert texts.prompt(text).keys[0] == known[0]


def test_a_new_text_has_keys_of_its_own(texts: Texts) -> None:
    """So that two requests with the same new text are sent to one replica."""
    first, second = texts.prompt(text_of([DOCUMENT])), texts.prompt(text_of([DOCUMENT]))
    assert first == second
    assert len(first.keys) == first.tokens // CHUNK
    other = texts.prompt(text_of(["x" + DOCUMENT]))
    assert not set(first.keys) & set(other.keys)


def test_the_length_of_a_new_text_is_estimated_from_reports(texts: Texts) -> None:
    text = text_of(["a new text " * 1000])
    before = texts.prompt(text).tokens
    for number in range(60):
        learn(texts, text_of([f"{number}" + DOCUMENT]), len(DOCUMENT) // 2)
    assert before == pytest.approx(text.length / 4, rel=0.01)
    assert texts.prompt(text).tokens == pytest.approx(text.length / 2, rel=0.02)


def test_a_text_without_a_whole_piece_has_no_keys(texts: Texts) -> None:
    text = text_of(["x" * (PIECE - 1)])
    learn(texts, text, 300)
    prompt = texts.prompt(text)
    assert prompt.keys == []
    assert prompt.tokens == pytest.approx((PIECE - 1) / 4, rel=0.1)


def test_no_text_is_one_token(texts: Texts) -> None:
    assert texts.prompt(Text(0, ())) == (1, [], 0.0)


def test_parts_do_not_run_together() -> None:
    assert text_of(["ab" * PIECE, "c" * PIECE]) != text_of(["ab" * PIECE + "c" * PIECE])


def test_any_text_can_be_hashed() -> None:
    assert text_of(["\ud800" * PIECE]).length == 3 * PIECE


def test_texts_go_that_were_not_asked_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts_module, "MAX_PIECES", 100)
    texts = Texts(CHUNK)
    first = text_of(["first" + DOCUMENT])
    known = learn(texts, first, 4000)
    for number in range(10):
        assert texts.prompt(first).keys[0] == known[0], "it is asked for"
        learn(texts, text_of([f"{number}" + DOCUMENT]), 4000, f"{number}-")
    assert len(texts._pieces) <= 100


QUESTION = "What is this?"


def picture(number: int) -> bytes:
    return f"{number:08}".encode() * 131_072  # a megabyte


def learned(texts: Texts, text: Text, known: list[bytes]) -> int:
    """The leading chunks whose keys are known."""
    return sum(key in known for key in texts.prompt(text).keys)


@pytest.mark.parametrize("tokens", [250, 1300, 20_000])
def test_a_medium_has_the_tokens_that_are_not_the_texts(texts: Texts, tokens: int) -> None:
    of_text = len(DOCUMENT + QUESTION) // 4
    learn(texts, text_of([DOCUMENT, picture(1), QUESTION]), of_text + tokens)
    again = texts.prompt(text_of([DOCUMENT, picture(1), QUESTION])).tokens
    assert again == pytest.approx(of_text + tokens, rel=0.01)
    another = texts.prompt(text_of([DOCUMENT, picture(2), "And that?"])).tokens
    assert another == pytest.approx(of_text + tokens, rel=0.05)
    two = texts.prompt(text_of(["A new text. ", picture(2), "and", picture(3)])).tokens
    assert two == pytest.approx(2 * tokens, rel=0.1)


def test_the_same_text_with_another_medium_is_known_up_to_it(texts: Texts) -> None:
    of_text = len(DOCUMENT) // 4
    known = learn(texts, text_of([DOCUMENT, picture(1), QUESTION]), of_text + 1300)
    other = text_of([DOCUMENT, picture(2), QUESTION])
    assert of_text // CHUNK - 2 <= learned(texts, other, known) <= of_text // CHUNK


def test_the_same_medium_with_another_question_is_known(texts: Texts) -> None:
    """Although the text before it fills no piece, nor does the question."""
    known = learn(texts, text_of(["Look: ", picture(1), QUESTION]), 1300)
    other = text_of(["Look: ", picture(1), "And then?"])
    assert learned(texts, other, known) == 10
    assert texts.prompt(other).tokens == pytest.approx(1300, rel=0.01)


def test_each_medium_has_its_place(texts: Texts) -> None:
    parts = [DOCUMENT, picture(1), DOCUMENT, picture(2), DOCUMENT]
    of_text = 3 * len(DOCUMENT) // 4
    known = learn(texts, text_of(parts), of_text + 2 * 1280)
    for end, tokens in ((2, of_text // 3 + 1280), (4, 2 * of_text // 3 + 2 * 1280)):
        other = text_of([*parts[:end], "something else " * 1000])
        assert learned(texts, other, known) == tokens // CHUNK


def test_media_teach_nothing_of_the_tokens_of_a_text(texts: Texts) -> None:
    learn(texts, text_of([DOCUMENT]), 4000)
    new = text_of(["another text " * 3000])
    before = texts.prompt(new).tokens
    for number in range(4):
        learn(texts, text_of([QUESTION, picture(number)]), 1500)
    assert texts.prompt(new).tokens == before
    assert text_of([QUESTION, picture(1)]).length == len(QUESTION)


def test_what_a_medium_has_is_told_from_the_beginning_that_is_known(texts: Texts) -> None:
    """The text of a long chat may have more tokens than others."""
    chat = [DOCUMENT * 5, "x" * PIECE]
    learn(texts, text_of(chat), len(DOCUMENT) * 2)
    for number in range(40):
        learn(texts, text_of([f"{number}" + DOCUMENT]), len(DOCUMENT) // 5)
    known = texts.prompt(text_of(chat)).tokens
    learn(texts, text_of([*chat, picture(1)]), known + 300)
    assert texts.prompt(text_of([picture(2)])).tokens == pytest.approx(300, rel=0.1)


def test_new_media_have_keys_of_their_own(texts: Texts) -> None:
    one, other = (text_of([DOCUMENT, picture(n), DOCUMENT]) for n in (1, 2))
    before = texts.prompt(one).keys
    shared = [*zip(before, texts.prompt(other).keys, strict=True)]
    alike = sum(first == second for first, second in shared)
    assert alike == one.media[0][0] - 1
    assert not {first for first, _ in shared[alike:]} & {second for _, second in shared[alike:]}
    learn(texts, text_of(["another", picture(3)]), 300)
    after = texts.prompt(one).keys
    assert after == before[: len(after)]


def test_texts_of_different_media_are_different() -> None:
    one, other = (text_of([picture(n), DOCUMENT]) for n in (1, 2))
    assert not {*one.hashes} & {*other.hashes}
    assert text_of([picture(1), DOCUMENT]) == one
    assert text_of([picture(1).decode(), DOCUMENT]) != one


def test_a_medium_is_a_piece_with_the_text_before_it_that_fills_none() -> None:
    text = text_of(["x" * 700, picture(1), "y" * 1500])
    ends = [(0, 0), (512, 0), (700, 1), (1212, 1), (1724, 1)]
    assert [text.up_to(pieces) for pieces in range(len(text.hashes) + 1)] == ends
    begins = [["ab", b"c"], ["a", b"bc"], ["ac", b"c"], ["abc"]]
    assert len({text_of([*parts, picture(1)]).hashes[-1] for parts in begins}) == 4


def test_a_long_prompt_says_more_of_the_tokens_of_a_text_than_a_short_one(texts: Texts) -> None:
    long = text_of(["a word " * 10_000])
    for _ in range(40):
        learn(texts, long, 20_000, "long")
        learn(texts, text_of(["short"]), 50, "short")  # the template alone
    assert texts.prompt(text_of(["new one" * 10_000])).tokens == pytest.approx(20_000, rel=0.1)


@pytest.mark.parametrize(("tokens", "least", "most"), [(1, 600, 700), (10**9, 9000, 10_000)])
def test_a_report_that_cannot_be_true_of_a_text_does_little(
    texts: Texts, tokens: int, least: int, most: int
) -> None:
    for _ in range(99):
        texts.learn(text_of([DOCUMENT]), tokens, [])
    assert least <= texts.prompt(text_of(["0123456789" * 1000])).tokens <= most
