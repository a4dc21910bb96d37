"""Documents to ask about: Markdown tables of invented people.

The same seed gives the same people. The text is generated and contains nobody's data. With the
tokenizer of `make_model` a row has about 50 tokens: 100 rows have about 5k, 240 rows about 12k.
"""

from typing import NamedTuple

from faker import Faker

COLUMNS = ("Id", "Name", "Age", "Job", "Company", "City", "Country", "Email", "Phone")


class Person(NamedTuple):
    """One row of a document; the fields are `COLUMNS` in their order."""

    id: int
    name: str
    age: int
    job: str
    company: str
    city: str
    country: str
    email: str
    phone: str


def people(seed: int, rows: int) -> list[Person]:
    """`rows` invented people; a longer list of the same seed starts with the shorter one."""
    fake = Faker("en_US")
    fake.seed_instance(seed)
    return [
        Person(
            id=number,
            name=fake.name(),
            age=fake.random_int(18, 90),
            job=fake.job(),
            company=fake.company(),
            city=fake.city(),
            country=fake.country(),
            email=fake.safe_email(),
            phone=fake.phone_number(),
        )
        for number in range(1, rows + 1)
    ]


def document(seed: int, rows: int) -> str:
    """A Markdown table of `people(seed, rows)` below a line that introduces it."""
    lines = [
        f"The following table, number {seed}, lists {rows} people.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(map(str, person)) + " |" for person in people(seed, rows)]
    return "\n".join(lines) + "\n"


def questions(seed: int, rows: int) -> list[str]:
    """Six questions about different rows of `document(seed, rows)`."""
    table = people(seed, rows)
    picked = [table[len(table) * place // 6] for place in range(6)]
    return [
        f"How old is {picked[0].name}?",
        f"Which company does {picked[1].name} work for?",
        f"In which city does {picked[2].name} live?",
        f"What is the phone number of {picked[3].name}?",
        f"What does {picked[4].name} do for a living?",
        f"Who can be reached at {picked[5].email}?",
    ]


def prompt(text: str, question: str) -> str:
    """Put the document first, so that prompts about one document share all but their ends."""
    return f"{text}\nQuestion: {question}\nAnswer:"
