"""Files, functions and classes stay small enough to be read at once."""

from pathlib import Path

import pytest

import fleet_operator
from tests.support.sizes import too_large_classes, too_long

ROOT = Path(fleet_operator.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
GIVEN = {
    "FleetJob": "typed facts of one spec, which templates, environments and plans read by these names",
    "FleetJobSpec": "the fields of the CRD",
    "FleetJobStatus": "the fields of the CRD",
    "LocalPod": "the fields of one value: what a pod's metadata, spec and status are on a cluster",
    "Metrics": "one counter and one note a metric; what one counts is in one place",
    "Observed": "the fields of one value: all that the cluster holds for one job",
    "ObservedPod": "the fields of one value: all that decisions know of a pod",
    "Settings": "one field a variable of the operator's environment",
}
"""What has as much in it as what it stands for."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_500_lines_and_no_function_than_60(path):
    assert too_long(path) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_class_has_more_than_fifteen_methods_or_twelve_attributes(path):
    assert list(too_large_classes(path, GIVEN)) == []


def test_every_exception_is_one():
    large = {name for path in MODULES for name in too_large_classes(path)}
    assert large == GIVEN.keys()
