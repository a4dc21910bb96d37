"""The keys of a text's chunks, learned from the replicas that compute it.

A router neither renders nor tokenizes a prompt. It hashes what goes into it piece by piece, each
hash with all that is before. When a replica schedules the request, it reports how many tokens the
prompt has, and its keys. From then on the router knows the keys of all texts that begin like this
one, as far as they do, and about how many tokens a text has. That works for whatever a prompt is
made of, such as templates, tools, adapters and images, and takes microseconds.

What nobody has asked yet has no keys. Until it has, its own hashes stand for them, so that requests
with the same new text are known to be alike.

Pure; belongs to one thread.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xinference_xavier.routing.choice import Prompt

PIECE = 512
"""Bytes of UTF-8."""
MAX_PIECES = 200_000
"""Pieces remembered, about 100 MB of text, evicted least recently used first. A second budget of
the same size covers requests that no replica has reported yet."""
MAX_UNDERWAY = 10_000
_BYTES_PER_TOKEN = 4.0  # before the first report
_TOKENS = 1000.0  # that this counts for
_WEIGHT = 0.1  # of the latest report
_LEAST, _MOST = 1.0, 16.0  # bytes of a token; anything else is no text
_MEDIA = {"audio_url", "document", "image", "image_url", "input_audio", "input_image", "video_url"}
"""Names in a request beside what is no text."""


class Text(NamedTuple):
    """What goes into a prompt: its length in bytes, and the hashes of its leading pieces. A prompt
    with `media` has tokens that are no text's."""

    length: int
    hashes: Sequence[bytes]
    media: bool = False


def text_of(parts: Iterable[str]) -> Text:
    """Parts that differ only in where they are divided are different texts. Encoded images and the
    like are counted as their hashes: their length says nothing of their tokens."""
    plain, before, media = list[bytes](), "", False
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        if part.startswith("data:") or (before == "data" and len(part) > PIECE):
            encoded, media = hashlib.blake2b(encoded, digest_size=16).digest(), True
        media = media or part in _MEDIA
        plain.append(encoded)
        before = part
    encoded = b"\0".join(plain)
    digest = hashlib.blake2b(digest_size=16)
    hashes = []
    for start in range(0, len(encoded) - PIECE + 1, PIECE):
        digest.update(encoded[start : start + PIECE])
        hashes.append(digest.copy().digest())
    return Text(len(encoded), hashes, media)


class _Known(NamedTuple):
    """A prompt that a replica has reported, and the length of its text."""

    tokens: int
    keys: Sequence[bytes]
    length: int


class Texts:
    """Learned keys of texts, in chunks of `chunk_tokens` tokens."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        # Sums over the reports, in which the latest counts most.
        self._bytes, self._tokens = _BYTES_PER_TOKEN * _TOKENS, _TOKENS
        # By the hash of each piece, with the bytes up to its end.
        self._pieces: OrderedDict[bytes, tuple[_Known, int]] = OrderedDict()
        self._underway: OrderedDict[str, Text] = OrderedDict()
        self._underway_pieces = 0

    def prompt(self, text: Text) -> Prompt:
        """What `text` will be as a prompt, as far as is known."""
        pieces = self._pieces
        known = next((n for n in range(len(text.hashes), 0, -1) if text.hashes[n - 1] in pieces), 0)
        tokens, keys, end = 0.0, list[bytes](), 0
        if known:
            found, end = pieces[text.hashes[known - 1]]
            tokens = found.tokens * end / found.length
            keys += found.keys[: int(tokens) // self._chunk_tokens]
            for piece in text.hashes[:known]:
                if piece in pieces:
                    pieces.move_to_end(piece)
        bytes_per_token = min(_MOST, max(_LEAST, self._bytes / self._tokens))
        tokens += (text.length - end) / bytes_per_token
        step = max(1, round(self._chunk_tokens * _BYTES_PER_TOKEN / PIECE))
        new = (n for n in range(known + 1, len(text.hashes) + 1) if n % step == 0)
        keys += [text.hashes[n - 1] for n in new]
        whole = max(1, round(tokens))
        return Prompt(whole, keys[: whole // self._chunk_tokens])

    def sent(self, request: str, text: Text) -> None:
        """A replica will report the request, perhaps after its answer, and not if it fails."""
        self._forget(request)
        self._underway[request] = text
        self._underway_pieces += len(text.hashes)
        while len(self._underway) > MAX_UNDERWAY or self._underway_pieces > MAX_PIECES:
            self._forget(next(iter(self._underway)))

    def _forget(self, request: str) -> Text | None:
        text = self._underway.pop(request, None)
        if text is not None:
            self._underway_pieces -= len(text.hashes)
        return text

    def scheduled(self, request: str, tokens: int, keys: Sequence[bytes]) -> None:
        """A replica's report; ignored if this router did not send the request."""
        text = self._forget(request)
        if text is None or not tokens or not text.length:
            return
        if not text.media:
            self._bytes += _WEIGHT * (text.length - self._bytes)
            self._tokens += _WEIGHT * (tokens - self._tokens)
        known = _Known(tokens, keys, text.length)
        for number, piece in enumerate(text.hashes, 1):
            self._pieces[piece] = known, number * PIECE
            self._pieces.move_to_end(piece)
        while len(self._pieces) > MAX_PIECES:
            self._pieces.popitem(last=False)
