"""What tests start is there before pytest starts: its time limit is for tests, not for builds."""

from __future__ import annotations

import subprocess

import pytest

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
