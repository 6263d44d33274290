"""Every promise of docs/reliability.md names tests, and they exist."""

import ast
import re

import pytest

from tests.meta.project import ROOT

PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
ROWS = [
    row for table in PAGE.split("| Promise | Test |\n|---|---|\n")[1:] for row in table.split("\n\n")[0].splitlines()
]
TESTS = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:60])
def test_a_promise_has_a_test(row: str) -> None:
    promise, named = row.strip("| ").rsplit(" | ", 1)
    assert promise.endswith(".")
    found = TESTS.findall(named)
    assert found and not TESTS.sub("", named).strip(", ")
    for path, name in found:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert not name or name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
