"""Checks of what peers send.

Messages with many fields are declared as types and checked by pydantic. The arguments of the
tracker's calls are checked one by one: there, pydantic takes four times as long.

Every check raises ValueError, and nothing else, whatever it is given; the text names the value.
"""

import json
import math
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from xinference_xavier.errors import shown
from xinference_xavier.runtime.addresses import split_address

MAX_IDENTIFIER = 256  # characters of a namespace, an incarnation or an address
MAX_KEY_BYTES = 1024
MAX_PORT = 65535
MAX_COUNT = (1 << 63) - 1


def _check_port(address: str) -> str:
    _, port = split_address(address)
    check_count("port", port, 0, MAX_PORT)
    return address


Identifier = Annotated[str, Field(min_length=1, max_length=MAX_IDENTIFIER)]
Address = Annotated[Identifier, AfterValidator(_check_port)]  # an actor's address, `host:port`
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def first_reason(error: ValueError) -> str:
    """What is wrong, in one line; the first fault if pydantic found several."""
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors(include_url=False)[0]
    name = ".".join(map(str, fault["loc"])) or "it"
    return f"{name}={shown(fault['input'])}: {fault['msg'].removeprefix('Value error, ')}"


def up_to(most: int) -> AfterValidator:
    """A validator for tuples of whole numbers, which must lie between 0 and `most`.

    Checked over the whole tuple, because pydantic takes ten times as long to compare each number
    above 2**63.
    """

    def check(values: tuple[int, ...]) -> tuple[int, ...]:
        if values and not 0 <= min(values) <= max(values) <= most:
            raise ValueError(f"the numbers must lie between 0 and {most}")
        return values

    return AfterValidator(check)


def check_identifier(name: str, value: object, most: int = MAX_IDENTIFIER) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise ValueError(f"{name}={shown(value)} is not a text of 1 to {most} characters")


def check_count(name: str, value: object, least: int, most: int = MAX_COUNT) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={shown(value)} is not a whole number from {least} to {most}")


def check_seconds(name: str, value: object, most: float = math.inf) -> None:
    """A time above 0 and below `most`."""
    if not isinstance(value, (int, float)) or not 0 < value < most:
        raise ValueError(f"{name}={shown(value)} is not a time above 0 and below {most:g} s")


def check_json_size(name: str, value: object, most: int) -> bytes:
    """`value` can be written as at most `most` bytes of JSON. Returns them."""
    try:
        written = json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    if len(written) > most:
        raise ValueError(f"{name} has {len(written)} bytes of JSON, more than {most}")
    return written
