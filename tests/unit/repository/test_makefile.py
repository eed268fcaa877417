"""What tests start is there before pytest starts: its time limit is for tests, not for builds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import fleet
import fleet_operator

GETS = ".venv/bin/python -m tools.assets"


@pytest.mark.parametrize(
    ("verb", "starts"),
    [
        ("test", ".venv/bin/pytest"),
        ("e2e", ".venv/bin/pytest tests/e2e"),
        ("bench-operator", ".venv/bin/python -m benchmarks.operator"),
        ("pod-fields", ".venv/bin/python -m tools.pod_fields"),
    ],
)
def test_the_programs_are_there_before_anything_starts_them(verb: str, starts: str):
    told = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", verb],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [line.strip() for line in told.stdout.splitlines()]
    (started,) = [number for number, line in enumerate(lines) if line.startswith(starts)]
    assert lines.index(GETS) < started


def test_the_packages_the_chart_and_the_images_have_one_version():
    (made,) = re.findall(r"^VERSION := (.*)$", Path("Makefile").read_text(), re.MULTILINE)
    chart = yaml.safe_load(Path("charts/fleet-operator/Chart.yaml").read_text())
    versions = {fleet.__version__, fleet_operator.__version__, chart["version"], chart["appVersion"]}
    assert versions == {made}
