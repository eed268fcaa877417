"""Classes of the control calls, of the trainer and of the transport stay small enough to be read at once."""

import ast
from pathlib import Path

import pytest

import fleet.parameter_server

ROOT = Path(fleet.parameter_server.__file__).parent
FOLDERS = ("control", "trainer", "transport")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
MOST_METHODS, MOST_ATTRIBUTES = 15, 12


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_class_has_more_than_fifteen_methods_or_twelve_attributes(path):
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.ClassDef):
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
