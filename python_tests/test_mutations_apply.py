"""Mutations of mutation_list still apply: their texts occur once and the tests they name exist."""

import ast
import re
from pathlib import Path

import pytest

from reliability.mutation_list import MUTATIONS

TESTS = Path(__file__).parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_the_text_occurs_once_and_the_tests_exist(mutation):
    source = (TESTS.parent / mutation.file).read_text(encoding="utf-8")
    changed = mutation.applied_to(source)
    assert changed != source
    if mutation.file.endswith(".py"):
        ast.parse(changed)
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name or 'test_'}", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), test


def test_names_are_unique():
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS) >= 36
