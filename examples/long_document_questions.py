"""Ask several questions about the same long documents, one after the other.

The document comes first in every prompt, so all prompts about it begin alike. The first replica to
see a document computes it, and the others fetch it if they are asked: with routing off, in turn.

    python -m examples.long_document_questions --endpoint http://127.0.0.1:9997 --model MODEL
"""

from collections.abc import Sequence

from examples.asking import Asker, arguments
from examples.documents import document, prompt, questions


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--rows", type=int, default=100, help="rows of a document, 50 tokens each")
    parser.add_argument("--questions", type=int, default=3, help="about each document, at most 6")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives other documents")
    options = parser.parse_args(words)
    with Asker(options) as asker:
        for number in range(options.seed, options.seed + options.documents):
            text = document(number, options.rows)
            print(f"document {number}")
            for question in questions(number, options.rows)[: options.questions]:
                answer = asker.complete(prompt(text, question))
                print(f"  {answer}\n    {question} {answer.text.strip()!r}")


if __name__ == "__main__":
    main()
