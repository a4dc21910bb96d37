"""Chat about a document: each turn repeats everything that was said before.

So the prompt of a turn begins with the whole prompt of the previous turn and its answer. The
replica that gets the turn fetches this beginning from the replica that answered last.

    python -m examples.multi_turn_chat --endpoint http://127.0.0.1:9997 --model MODEL
"""

from collections.abc import Sequence

from examples.asking import Asker, arguments
from examples.documents import document, questions


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rows", type=int, default=100, help="rows of the document, 50 tokens each"
    )
    parser.add_argument("--turns", type=int, default=4, help="at most 6")
    parser.add_argument("--seed", type=int, default=11, help="another seed gives another document")
    options = parser.parse_args(words)
    messages = [
        {
            "role": "system",
            "content": f"Answer from this table only.\n\n{document(options.seed, options.rows)}",
        }
    ]
    with Asker(options) as asker:
        for number, question in enumerate(questions(options.seed, options.rows), start=1):
            if number > options.turns:
                break
            messages.append({"role": "user", "content": question})
            answer = asker.chat(messages)
            messages.append({"role": "assistant", "content": answer.text})
            print(f"turn {number}\n  {answer}\n    {question} {answer.text.strip()!r}")


if __name__ == "__main__":
    main()
