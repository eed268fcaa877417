"""Files, functions and classes stay small enough to be read at once."""

import ast
from pathlib import Path

import pytest

import fleet.parameter_server

ROOT = Path(fleet.parameter_server.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if not path.stem.startswith("control_pb2"))
"""All but the generated ones."""
FACADE = "singleton.py", "Fleet"
"""What scripts call; the other class of this kind is of the collective path."""
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 500, 60
MOST_METHODS, MOST_ATTRIBUTES = 15, 12


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_file_is_longer_than_500_lines_and_no_function_than_60(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    for found in ast.walk(ast.parse(text)):
        if isinstance(found, ast.FunctionDef):
            assert (found.end_lineno or 0) - found.lineno < MOST_LINES_OF_A_FUNCTION, found.name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_class_has_more_than_fifteen_methods_or_twelve_attributes(path):
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.ClassDef) and (path.name, found.name) != FACADE:
            methods = [each for each in found.body if isinstance(each, ast.FunctionDef)]
            assert len(methods) <= MOST_METHODS, found.name
            assert len(attributes_of(found)) <= MOST_ATTRIBUTES, found.name


def attributes_of(found: ast.ClassDef) -> set[str]:
    """Return the names that a class declares, or assigns to on ``self``."""
    declared = {
        each.target.id
        for each in found.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        each.attr
        for each in ast.walk(found)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return declared | assigned
