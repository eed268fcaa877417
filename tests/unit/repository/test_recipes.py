"""Each block of code of the page about one's own script is run by a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.recipes import PAGE, recipes

RUNTIME = Path(__file__).parents[2] / "runtime"
TESTS = [*RUNTIME.glob("recipes/test_*.py"), *RUNTIME.glob("wheels/test_*.py")]


def test_every_block_has_a_name_of_its_own():
    assert len(recipes()) == len(re.findall(r"^```\w", PAGE.read_text(), re.MULTILINE)) > 0


@pytest.mark.parametrize("name", recipes())
def test_a_test_runs_it(name: str):
    whole = name.partition("/")[0]  # a recipe of several pieces
    assert any(f'"{whole}"' in test.read_text() for test in TESTS)
