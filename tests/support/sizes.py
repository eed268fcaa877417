"""How much there is to read at once: lines of files and functions, methods and attributes of classes."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

__all__ = ["too_large_classes", "too_long"]

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 500, 60
MOST_METHODS, MOST_ATTRIBUTES = 15, 12

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def too_long(path: Path) -> list[str]:
    """Return what of a file has too many lines: the file itself, and functions in it."""
    text = path.read_text()
    functions = (each for each in ast.walk(ast.parse(text)) if isinstance(each, FUNCTIONS))
    long = [
        each.name for each in functions if (each.end_lineno or 0) - each.lineno >= MOST_LINES_OF_A_FUNCTION
    ]
    return [path.name, *long] if len(text.splitlines()) > MOST_LINES else long


def too_large_classes(path: Path, given: Collection[str] = ()) -> Iterator[str]:
    """Return the classes of a file that have too many methods or attributes, but for those of these names."""
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.ClassDef) and found.name not in given:
            methods = {each.name for each in found.body if isinstance(each, FUNCTIONS)}
            if len(methods) > MOST_METHODS or len(_attributes(found)) > MOST_ATTRIBUTES:
                yield found.name


def _attributes(found: ast.ClassDef) -> set[str]:
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
