"""The keys of a text's chunks, learned from the replicas that compute it.

A router neither renders nor tokenizes a prompt. It hashes what goes into it piece by piece, each
hash with all that is before. When a replica schedules the request, it reports how many tokens the
prompt has, and its keys. From then on the router knows the keys of all texts that begin like this
one, as far as they do, and about how many tokens a text has. That works for whatever a prompt is
made of, such as templates, tools, adapters and images, and takes microseconds.

A medium, such as an image, is a piece of its own. Its bytes say nothing of its tokens: they are
what a prompt has beyond the tokens of its text.

What nobody has asked yet has no keys. Until it has, its own hashes stand for them, so that requests
with the same new text are known to be alike.

Pure; belongs to one thread.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from cachetools import LRUCache

from xinference_xavier.routing.forecast import Prompt

PIECE = 512
"""Bytes of UTF-8."""
MAX_PIECES = 200_000
"""Pieces remembered, about 100 MB of text, evicted least recently used first."""
_BYTES_PER_TOKEN = 4.0  # before the first report
_TOKENS = 1000.0  # that this counts for
_LEAST, _MOST = 1.0, 16.0  # bytes of a token; anything else is no text
_MEDIUM_TOKENS = 1024.0  # before the first report
_MEDIA = 0.001  # that this counts for
_MOST_MEDIUM = 100_000.0  # tokens
_WEIGHT = 0.1  # of the latest report


class Text(NamedTuple):
    """What goes into a prompt: its bytes of text, and the hashes of its leading pieces, of which
    each medium is one. `media` has the pieces and the bytes up to the end of each medium."""

    length: int
    hashes: Sequence[bytes]
    media: Sequence[tuple[int, int]] = ()

    def up_to(self, piece: int) -> tuple[int, int]:
        """Bytes of text, and media, in the leading pieces."""
        media = bisect_right(self.media, (piece, self.length))
        medium, length = self.media[media - 1] if media else (0, 0)
        return length + (piece - medium) * PIECE, media


def text_of(parts: Iterable[str | bytes]) -> Text:
    """Parts of bytes are no text: those between two texts are one medium. Parts that differ only in
    where they are divided are different texts."""
    digest = hashlib.blake2b(digest_size=16)
    length, hashes, media = 0, list[bytes](), list[tuple[int, int]]()
    for kind, run in groupby(parts, type):
        encoded = b"\0".join(
            part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
            for part in run
        )
        if kind is bytes:
            digest.update(b"\0")
            digest.update(encoded)
            hashes.append(digest.copy().digest())
            media.append((len(hashes), length))
            continue
        rest = len(encoded) % PIECE
        for start in range(0, len(encoded) - rest, PIECE):
            digest.update(encoded[start : start + PIECE])
            hashes.append(digest.copy().digest())
        digest.update(encoded[len(encoded) - rest :])
        length += len(encoded)
    return Text(length, hashes, media)


class _Known(NamedTuple):
    """A prompt that a replica has reported, and how much text and how many media it has."""

    tokens: int
    keys: Sequence[bytes]
    length: int
    media: int


class _Ratio:
    """A ratio of sums over the reports, in which the latest counts most."""

    def __init__(self, first: float, weight: float, least: float, most: float) -> None:
        self._over, self._under = first * weight, weight
        self._least, self._most = least, most

    def add(self, over: float, under: float) -> None:
        self._over += _WEIGHT * (over - self._over)
        self._under += _WEIGHT * (under - self._under)

    @property
    def value(self) -> float:
        return min(self._most, max(self._least, self._over / self._under))


class Texts:
    """Learned keys of texts, in chunks of `chunk_tokens` tokens."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._bytes_per_token = _Ratio(_BYTES_PER_TOKEN, _TOKENS, _LEAST, _MOST)
        self._tokens_per_medium = _Ratio(_MEDIUM_TOKENS, _MEDIA, 0.0, _MOST_MEDIUM)
        self._pieces: LRUCache[bytes, _Known] = LRUCache(MAX_PIECES)  # by hash

    def prompt(self, text: Text) -> Prompt:
        """What `text` will be as a prompt, as far as is known."""
        known, tokens, learned = self._beginning(text)
        for piece in text.hashes[:known]:
            self._pieces.get(piece)  # it is used
        keys = [*learned[: int(tokens) // self._chunk_tokens]]
        step = max(1, round(self._chunk_tokens * _BYTES_PER_TOKEN / PIECE))
        new = (n for n in range(known + 1, len(text.hashes) + 1) if n % step == 0)
        keys += [text.hashes[n - 1] for n in new]
        length, media = text.up_to(known)
        tokens += (text.length - length) / self._bytes_per_token.value
        tokens += (len(text.media) - media) * self._tokens_per_medium.value
        whole = max(1, round(tokens))
        return Prompt(whole, keys[: whole // self._chunk_tokens])

    def _beginning(self, text: Text) -> tuple[int, float, Sequence[bytes]]:
        """The leading pieces that are known, their tokens, and keys that begin with theirs."""
        pieces, hashes = self._pieces, text.hashes
        number = next((n for n in range(len(hashes), 0, -1) if hashes[n - 1] in pieces), 0)
        if not number:
            return 0, 0.0, ()
        known = pieces[hashes[number - 1]]
        length, media = text.up_to(number)
        of_text, of_media = float(known.tokens), 0.0
        if known.media:
            of_text = min(of_text, known.length / self._bytes_per_token.value)
            of_media = (known.tokens - of_text) / known.media
        return number, of_text * length / known.length + of_media * media, known.keys

    def learn(self, text: Text, tokens: int, keys: Sequence[bytes]) -> None:
        """A replica has rendered the text to a prompt of so many tokens, with these keys."""
        if not tokens or not text.length:
            return
        self._learn_ratios(text, tokens)
        known = _Known(tokens, keys, text.length, len(text.media))
        for piece in text.hashes:
            self._pieces[piece] = known

    def _learn_ratios(self, text: Text, tokens: int) -> None:
        if not text.media:
            self._bytes_per_token.add(text.length, tokens)
            return
        known, before, _ = self._beginning(text)
        length, media = text.up_to(known)
        if new := len(text.media) - media:
            of_text = before + (text.length - length) / self._bytes_per_token.value
            self._tokens_per_medium.add(max(0.0, tokens - of_text), new)
