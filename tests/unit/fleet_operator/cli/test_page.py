from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fleet_operator.cli.page import draw_loss_curves

if TYPE_CHECKING:
    from pathlib import Path

WRITE_PAGE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from fleet_operator.cli import command
command.render_page = lambda *_: "\\u00e9"
result = SimpleNamespace(view=SimpleNamespace(replicas={}))
command._write_page(result, Path(sys.argv[1]), "", SimpleNamespace(say=print))
"""


def test_a_curve_is_drawn_for_light_pages_and_for_dark_ones():
    picture = draw_loss_curves({"trainer-0": {1: 2.0, 2: 1.0}, "trainer-1": {}}, "digits")
    assert picture.light.startswith(b"\x89PNG")
    assert picture.dark.startswith(b"\x89PNG")
    assert picture.light != picture.dark


@pytest.mark.programs
def test_the_page_is_utf_8_in_every_locale(tmp_path: Path):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", WRITE_PAGE, str(tmp_path)]
    subprocess.run(command, env=os.environ | ascii_only, timeout=60, check=True)
    assert (tmp_path / "summary.html").read_text(encoding="utf-8") == "é"
