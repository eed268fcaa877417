"""Files, functions and classes stay small enough to be read at once."""

from pathlib import Path

import pytest

import fleet
from tests.support.sizes import too_large_classes, too_long

ROOT = Path(fleet.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if not path.stem.startswith("control_pb2"))
"""All but the generated ones."""
GIVEN = {"Fleet", "DistributeTranspilerConfig", "DistributedStrategy", "DistributedTable"}
"""What scripts call and set: there is as much of it as a script may ask for."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_500_lines_and_no_function_than_60(path):
    assert too_long(path) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_class_has_more_than_fifteen_methods_or_twelve_attributes(path):
    assert list(too_large_classes(path, GIVEN)) == []
