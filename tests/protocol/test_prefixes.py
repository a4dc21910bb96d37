"""What trackers and replicas tell each other about named prefixes is checked."""

import pytest

from xinference_xavier.protocol.prefixes import (
    MAX_PREFIXES,
    Keeping,
    Kept,
    KeptPrefix,
    check_kept,
    check_wanted,
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


def test_what_is_wanted() -> None:
    assert check_wanted({PREFIX: True}) == {PREFIX: True}


@pytest.mark.parametrize(
    "wanted",
    [
        [PREFIX],
        {"../etc": True},
        {PREFIX: 1},
        {f"{number:016x}": True for number in range(MAX_PREFIXES + 1)},
    ],
    ids=["list", "name", "number", "too many"],
)
def test_anything_else_is_refused(wanted: object) -> None:
    with pytest.raises(ValueError, match="malformed prefixes"):
        check_wanted(wanted)


def test_what_is_kept() -> None:
    kept = Kept({PREFIX: KeptPrefix(100, 4, 3, firm=True)}, 10, 5, 4)
    assert check_kept(kept) == kept


def test_a_replica_cannot_claim_nonsense() -> None:
    with pytest.raises(ValueError, match="malformed kept prefixes"):
        check_kept(({PREFIX: (100, 4, -1, True)}, 10, 5, 4))
