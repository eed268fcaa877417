"""The cores that a process may use: those of its machine, or fewer by its container's limit."""

import os
from pathlib import Path

import pytest

from fleet.process.cores import available_cores


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param("max 100000\n", 8, id="no-limit"),
        pytest.param("200000 100000\n", 2, id="a-limit"),
        pytest.param("250000 100000\n", 3, id="a-part-of-a-core-is-a-core"),
        pytest.param("10000 100000\n", 1, id="at-least-one"),
        pytest.param("6400000 100000\n", 8, id="a-limit-above-what-there-is"),
        pytest.param("", 8, id="an-empty-file"),
        pytest.param(None, 8, id="no-control-group"),
    ],
)
def test_available_cores(told: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    file = tmp_path / "cpu.max"
    if told is not None:
        file.write_text(told)
    assert available_cores(file) == expected
