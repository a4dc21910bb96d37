"""Errors cross process boundaries unchanged."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import xinference_xavier
from xinference_xavier.errors import ROLLBACKS, ConfigError, NotFoundError, XavierError
from xinference_xavier.transfer import links
from xinference_xavier.transfer.links import ChecksumError

SOURCES = sorted(Path(xinference_xavier.__file__).parent.rglob("*.py"))
_BEFORE = (
    r"GrantRefusedError\(|PullResult\(\w+, |_finish\(fetch, |\breason(?:: [\w |]+)? = (?:.* else )?"
)
REASON = re.compile(rf'(?:{_BEFORE})"([^"]+)"')


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("xavier_pool_bytes", "4QiB", "is not a size", "use 4GiB"),
        ConfigError("xavier_host", None, "is not a host", "name one"),
        ConfigError("xavier_host", object(), "is not a host", "name one"),
        ConfigError("xavier_host", lambda: None, "is not a host", "name one"),
        NotFoundError("model 'm' is not running here"),
    ],
)
def test_errors_survive_pickling(error: XavierError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_a_refused_option_is_a_value_error() -> None:
    """xinference answers ValueError with status 400."""
    assert issubclass(ConfigError, ValueError)


def calls(name: str, arguments: int) -> Iterator[ast.Call]:
    """The package's calls of `name` with so many arguments."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func, args) if ast.unparse(func) == name and len(args) == arguments:
                    yield node


@pytest.mark.parametrize(("name", "arguments"), [("ConfigError", 4), ("Finding", 3)])
def test_every_refusal_and_every_finding_of_the_doctor_has_a_remedy(
    name: str, arguments: int
) -> None:
    """Messages are all that reaches operators: no page lists them."""
    found = list(calls(name, arguments))
    assert len(found) > 15
    for call in found:
        remedy = call.args[-1]
        if isinstance(remedy, ast.Constant):
            assert len(str(remedy.value).split()) > 1, ast.unparse(call)


def test_every_reason_of_a_rollback_is_a_known_one() -> None:
    """Any other one would be `other` in metrics, and missing in the documentation."""
    found = {
        reason
        for file in SOURCES
        if file.parent.name in ("replica", "transfer", "protocol")
        for reason in REASON.findall(file.read_text())
    }
    found |= {links._reason(error) for error in (ChecksumError(), TimeoutError(), OSError())}
    assert {"timeout", "checksum", "busy", "stopped", "donor gone", "refused", "link"} <= found
    assert found <= set(ROLLBACKS)
