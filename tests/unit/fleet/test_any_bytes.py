"""Bytes that a fuzzer chooses by the lines that they lead to: read, or refused by an error of ours."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.any_bytes import readers

RUNS = 40_000
BOUNDED = ("-seed=18", f"-runs={RUNS}", "-max_total_time=20", "-timeout=10", "-rss_limit_mb=4096")


@pytest.mark.parametrize("name", readers())
def test_there_is_a_message_that_each_reader_takes(name: str):
    read, message = readers()[name]
    read(message)


@pytest.mark.programs
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="there is no atheris for this system")
def test_no_bytes_end_a_reader_by_an_error_that_is_not_ours(tmp_path: Path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, (name, (_, message)) in enumerate(readers().items()):
        (corpus / name).write_bytes(bytes([number]) + message)
    command = [sys.executable, "-m", "tests.support.any_bytes", str(corpus), *BOUNDED]
    environ = os.environ | {"PYTHONPATH": str(Path.cwd())}
    found = subprocess.run(
        [*command, f"-artifact_prefix={tmp_path}/"], capture_output=True, env=environ, timeout=110
    )
    words = found.stdout.decode(errors="replace") + found.stderr.decode(errors="replace")
    assert found.returncode == 0, words[-4000:]
    assert "Done " in words
