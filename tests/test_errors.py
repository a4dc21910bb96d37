"""Errors cross process boundaries unchanged."""

from __future__ import annotations

import pickle

import pytest

from xinference_xavier.errors import ConfigError, NotFoundError, XavierError


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
