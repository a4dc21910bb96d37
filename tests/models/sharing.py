"""Two engines that share and one that does not, all asked the same question."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from examples.processes import until
from tests.harness.engines import SETTLE, Completion, Fleet, Kind, Prompts
from tests.models.architectures import VOCABULARY

FIRST, SECOND, PLAIN = "first", "second", "plain"
BLOCK = 32
CHUNK = 128
"""Tokens, unless the model requires more."""
CONTEXT = 4096
TOLERANCE = 2e-4
"""The largest difference of log-probabilities in float32. On processors without AVX-512, vLLM by
itself differs by 0.7e-4 between computing a prompt and finding it in its own prefix cache, over
long answers by more. Another prefix changes them at least a hundred times as much."""
GREEDY: Mapping[str, Any] = {
    "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 20, "detokenize": False,
}  # fmt: skip
_PATIENCE = 60.0


class Shared(NamedTuple):
    """The answers to one question. `remote` counts the tokens that the second engine copied."""

    cold: list[Completion]
    """The answers of the engine that does not share."""
    first: list[Completion]
    second: list[Completion]
    remote: int

    @property
    def error(self) -> float:
        """The largest difference between the cold answers and those of the sharing engines."""
        return max(difference(self.cold, self.first), difference(self.cold, self.second))


def difference(one: Sequence[Completion], other: Sequence[Completion]) -> float:
    """The largest difference of log-probabilities.

    Only tokens that both list count, because the least likely ones may change places. Where two
    answers part, the one's token must be as likely as the other's; what follows has no meaning.
    """
    pairs: list[tuple[float, float]] = []
    for a, b in zip(one, other, strict=True):
        same = len(
            [*takewhile(lambda both: both[0] == both[1], zip(a.tokens, b.tokens, strict=False))]
        )
        if same < max(len(a.tokens), len(b.tokens)):
            if same == min(len(a.tokens), len(b.tokens)):
                return math.inf
            ours, theirs = a.tokens[same], b.tokens[same]
            pairs += [
                (each[same].get(ours, -math.inf), each[same].get(theirs, -math.inf))
                for each in (a.logprobs, b.logprobs)
            ]
        compared = zip(a.logprobs[: same + 1], b.logprobs[: same + 1], strict=True)
        prompts = zip(a.prompt_logprobs, b.prompt_logprobs, strict=True)
        for position, against in (*compared, *prompts):
            pairs += [(position[each], against[each]) for each in position.keys() & against.keys()]
    return max(0.0 if a == b else abs(a - b) for a, b in pairs)  # forbidden tokens have -inf


def whole_chunks(tokens: int) -> int:
    """Tokens that can be copied. If that is the whole prompt, vLLM computes the last one again."""
    return tokens // CHUNK * CHUNK


class Engines(Fleet):
    """Most have the engines `FIRST`, `SECOND` and `PLAIN`."""

    def __init__(self, kinds: Mapping[str, Kind], **more: Any) -> None:
        super().__init__(kinds, **more)
        self.prompts = Prompts(vocabulary=range(10, VOCABULARY))

    def ask(
        self,
        name: str,
        prompt: Any,
        *,
        sampling: Mapping[str, Any] = {},
        lora: Mapping[str, Any] | None = None,
        rank: int | None = None,
    ) -> list[Completion]:
        """`prompt` is a list of token ids, or anything else that vLLM accepts."""
        given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        how = {**GREEDY, **sampling}
        answer: list[Completion] = self[name].call("generate", given, how, lora, rank)
        return answer

    def share(self, prompt: Any, **how: Any) -> Shared:
        """Ask the plain engine, then the first and, when its chunks are published, the second."""
        cold = self.ask(PLAIN, prompt, **how)
        first = self.ask(FIRST, prompt, **how)
        self.settle()
        before = self.hits(SECOND)["remote"]
        second = self.ask(SECOND, prompt, **how)
        return Shared(cold, first, second, self.hits(SECOND)["remote"] - before)

    def settle(self) -> None:
        """Wait until all stored chunks are published and all engines know them."""
        seen: list[Any] = []

        def at_rest() -> bool:
            replicas = self.replicas()
            stats = {name: replica["stats"] for name, replica in replicas.items()}
            held = {name: replica["holdings"] for name, replica in replicas.items()}
            seen.append(held)
            return (
                len(seen) > 1
                and seen[-1] == seen[-2]
                and all(
                    each["pool"]["filling"] == 0 and each["pool"]["ready"] == held[name]
                    for name, each in stats.items()
                )
            )

        assert until(at_rest, _PATIENCE, SETTLE), f"holdings keep changing: {seen[-2:]}"

    def hits(self, name: str) -> dict[str, int]:
        found: dict[str, int] = self.stats(name)["hits"]
        return found

    def forget(self, name: str) -> None:
        """Empty the engine's own prefix cache, but not its pool."""
        self[name].call("forget")


def kind(arguments: Mapping[str, Any] = {}, options: Mapping[str, Any] = {}, **more: Any) -> Kind:
    """An engine that shares, with a small model in float32."""
    small = {
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": CONTEXT,
        "num_gpu_blocks_override": 2 * CONTEXT // BLOCK,
        "kv_cache_memory_bytes": 256 << 20,
    }
    always = {"chunk_tokens": None, "min_fetch_tokens": 1, "pool_bytes": 64 << 20}
    return Kind(arguments=small | dict(arguments), options=always | dict(options), **more)


def three(model: Path, like: Kind) -> Engines:
    return Engines({FIRST: like, SECOND: like, PLAIN: like._replace(transport=None)}, model=model)
