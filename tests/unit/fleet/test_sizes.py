"""Files, functions and classes stay small enough to be read at once."""

import ast
from pathlib import Path

import pytest

import fleet

ROOT = Path(fleet.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if not path.stem.startswith("control_pb2"))
"""All but the generated ones."""
GIVEN = {"Fleet", "DistributeTranspilerConfig", "DistributedStrategy", "DistributedTable"}
"""What scripts call and set: there is as much of it as a script may ask for."""
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 500, 60
MOST_METHODS, MOST_ATTRIBUTES = 15, 12


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_500_lines_and_no_function_than_60(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    for found in ast.walk(ast.parse(text)):
        if isinstance(found, ast.FunctionDef):
            assert (found.end_lineno or 0) - found.lineno < MOST_LINES_OF_A_FUNCTION, found.name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_class_has_more_than_fifteen_methods_or_twelve_attributes(path):
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.ClassDef) and found.name not in GIVEN:
            methods = {each.name for each in found.body if isinstance(each, ast.FunctionDef)}
            assert len(methods) <= MOST_METHODS, found.name
            assert len(attributes_of(found)) <= MOST_ATTRIBUTES, found.name


def attributes_of(found: ast.ClassDef) -> set[str]:
    """Return the names that instances of a class have: those declared, or assigned to on ``self``."""
    declared = {
        each.target.id
        for each in found.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and not ast.unparse(each.annotation).startswith("ClassVar")
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
