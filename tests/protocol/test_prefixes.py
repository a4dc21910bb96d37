"""A request's id says which prefix it computes, or that its prompt is to be kept."""

import pytest

from xinference_xavier.protocol.prefixes import (
    Keeping,
    keeping_of,
    prefix_of,
    request_id,
    with_keeping,
)

PREFIX = "0123456789abcdef"


def test_a_request_names_the_prefix_that_it_computes() -> None:
    assert prefix_of(request_id(PREFIX, 12)) == PREFIX


@pytest.mark.parametrize(
    "other", ["", PREFIX, "chatcmpl-1", "xavier-prefix-short-1", f"xavier-prefix-{PREFIX}-x"]
)
def test_other_requests_name_none(other: str) -> None:
    assert prefix_of(other) is None


@pytest.mark.parametrize("keeping", [Keeping(300.0, 1.0), Keeping(86400.0, 0.25)])
def test_a_request_says_that_its_prompt_is_to_be_kept(keeping: Keeping) -> None:
    assert keeping_of(with_keeping("r", keeping)) == keeping


@pytest.mark.parametrize("other", ["", "r", "r-xavier-keep-300-1000-", "xavier-keep-300000-1-r"])
def test_other_requests_do_not(other: str) -> None:
    assert keeping_of(other) is None
