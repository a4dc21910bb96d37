"""The list of mutations is up to date: each can be made, and its tests exist."""

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation

EACH = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.file)


@EACH
def test_the_text_occurs_once_and_what_replaces_it_is_python(mutation: Mutation) -> None:
    assert mutation.new != mutation.old
    ast.parse(mutation.mutated())


@EACH
def test_the_tests_that_must_fail_exist(mutation: Mutation) -> None:
    assert mutation.tests
    assert [test for test in mutation.tests if not (ROOT / test).exists()] == []
