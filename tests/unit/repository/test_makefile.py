"""What tests start is there before pytest starts: its time limit is for tests, not for builds."""

from __future__ import annotations

import subprocess

import pytest

GETS = ".venv/bin/python -m tools.assets"


@pytest.mark.parametrize(
    ("verb", "gets", "starts"),
    [
        ("test", f"{GETS} --without-go", ".venv/bin/pytest"),
        ("test-kueue", f"{GETS} kueue coscheduling", ".venv/bin/pytest tests/controlplane/test_kueue.py"),
        ("e2e", GETS, ".venv/bin/pytest tests/e2e"),
        ("bench-operator", GETS, ".venv/bin/python -m benchmarks.operator"),
        ("pod-fields", GETS, ".venv/bin/python -m tools.pod_fields"),
    ],
)
def test_the_programs_are_there_before_anything_starts_them(verb: str, gets: str, starts: str):
    told = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", verb],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [line.strip() for line in told.stdout.splitlines()]
    (started,) = [number for number, line in enumerate(lines) if line.startswith(starts)]
    assert lines.index(gets) < started
