"""Answer questions from retrieved passages: the same passages come up again and again.

Two things make them shareable: the passages come before the question, and always in the same order,
whatever their rank. Then prompts that need the same passages begin alike.

    python -m examples.retrieval --endpoint http://127.0.0.1:9997 --model MODEL
"""

import re
from collections.abc import Sequence

from examples.asking import Asker, arguments
from examples.documents import document, prompt, questions

PASSAGES_PER_QUESTION = 2


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--passages", type=int, default=4, help="passages in the library")
    parser.add_argument("--rows", type=int, default=40, help="rows of a passage, 50 tokens each")
    parser.add_argument("--questions", type=int, default=2, help="about each passage, at most 6")
    parser.add_argument("--seed", type=int, default=21, help="another seed gives another library")
    options = parser.parse_args(words)
    numbers = range(options.seed, options.seed + options.passages)
    library = [document(number, options.rows) for number in numbers]
    with Asker(options) as asker:
        for number in numbers:
            for question in questions(number, options.rows)[: options.questions]:
                found = retrieve(library, question)
                answer = asker.complete(
                    prompt("\n".join(library[place] for place in found), question)
                )
                names = ", ".join(f"{options.seed + place}" for place in found)
                print(f"passages {names}\n  {answer}\n    {question} {answer.text.strip()!r}")


def retrieve(library: Sequence[str], question: str) -> list[int]:
    """Positions of the passages that share most words with the question, in the library's order.

    This stands in for a search by embeddings; what matters here is the order of the result.
    """
    wanted = words_of(question)
    ranked = sorted(
        range(len(library)), key=lambda place: len(wanted & words_of(library[place])), reverse=True
    )
    return sorted(ranked[:PASSAGES_PER_QUESTION])


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


if __name__ == "__main__":
    main()
