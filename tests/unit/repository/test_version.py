"""The version stands in one place for each package; everything that repeats it is compared here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import fleet
import fleet_operator

VERSION = fleet_operator.__version__
NAMING = sorted([Path("README.md"), *Path("docs").rglob("*.md"), *Path("examples").rglob("*.yaml")])


def test_both_packages_and_the_chart_have_one_version():
    chart = yaml.safe_load(Path("charts/fleet-operator/Chart.yaml").read_text())
    assert {fleet.__version__, chart["version"], chart["appVersion"]} == {VERSION}


def test_make_reads_it_from_the_package():
    commands = subprocess.run(
        ["make", "--dry-run", "image"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert f"operator=fleet-operator:{VERSION} trainer=fleet-trainer:{VERSION}" in commands


@pytest.mark.parametrize(("tag", "fits"), [(f"v{VERSION}", True), (VERSION, False), ("v9.9.9", False)])
def test_a_tag_that_is_of_another_version_is_refused(tag: str, fits: bool):
    ended = subprocess.run(
        ["make", "check-tag", f"TAG={tag}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode == 0) is fits
    assert fits or f"tag v{VERSION}" in ended.stderr


def test_the_images_of_pages_and_examples_have_it():
    named = {
        (path, version)
        for path in NAMING
        for version in re.findall(r"fleet-(?:operator|trainer):(\d[\w.]*\w)", path.read_text())
    }
    assert len(named) > 10
    assert {(path, version) for path, version in named if version != VERSION} == set()


def test_the_changelog_begins_with_it():
    newest = re.search(r"^## \[(.+?)\]", Path("CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == VERSION
