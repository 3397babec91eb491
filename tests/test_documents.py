"""What the documents name exists."""

import ast
import re

from conftest import ROOT

DOCUMENT = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")


def test_every_promise_names_its_tests():
    rows = re.findall(r"^\| (\d+) \| .+? \| (.+) \|$", DOCUMENT, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 38))
    assert all("::test_" in tests for _, tests in rows)


def test_every_test_that_is_named_exists():
    named = re.findall(r"(\w+)::(test_\w+)", DOCUMENT.partition("\n| | holds")[2])
    assert len(named) > 37
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(f"test_{file}.py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test in functions, f"{path} has no {test}"
