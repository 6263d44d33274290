"""What `make mutations` breaks still stands where it stood; else that would stop when somebody runs it, much later."""

import ast

import pytest

from tests.meta.project import ROOT
from tests.mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.before}"[:80])
def test_a_mutation_changes_one_place_and_names_tests_that_exist(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert source.count(mutation.before) == 1
    changed = ast.parse(source.replace(mutation.before, mutation.after))
    assert ast.dump(changed) != ast.dump(ast.parse(source))
    assert mutation.tests and all((ROOT / test.partition("::")[0]).is_file() for test in mutation.tests)
