"""The page of complaints names tests that are there, and every test of a complaint is on it."""

import ast
import re
from pathlib import Path

import pytest

NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", Path("docs/complaints.md").read_text())))
STORIES = "tests/unit/fleet_operator/test_complaints.py"


def stories_in(path: str) -> set[str]:
    tree = ast.parse(Path(path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {each.name for each in tree.body if isinstance(each, functions) and each.name.startswith("test_")}


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_what_it_names_is_a_test(path: str, name: str):
    assert name in stories_in(path)


def test_it_names_every_story():
    assert stories_in(STORIES) == {name for path, name in NAMED if path == STORIES}
