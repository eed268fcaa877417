"""The trainer image's interpreter as the first process of a container, here under an ordinary pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLS = Path("tools/image").absolute()
SECONDS = 20

STUCK_IN_C = "import re; print('stuck', flush=True); re.match('(a+)+$', 'a' * 64 + 'b')"


@contextlib.contextmanager
def start(program: str) -> Iterator[subprocess.Popen[str]]:
    """Start `program` as the interpreter of the image would if it were the first process."""
    prelude = f"import sys; sys.path.insert(0, {str(TOOLS)!r})\nimport fleet_pid1; fleet_pid1.supervise()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", prelude + program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # both: what the first process started does not go with it
        process.communicate()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param("sys.exit(0)", 0, id="success"),
        pytest.param("sys.exit(90)", 90, id="the program's own status"),
        pytest.param("raise ValueError", 1, id="an exception"),
        pytest.param("import os; os.kill(os.getpid(), 9)", 137, id="killed"),
    ],
)
def test_ends_as_the_program_ends(program, expected):
    with start(program) as process:
        assert process.wait(SECONDS) == expected


def test_sigterm_ends_a_program_that_runs_no_bytecode():
    with start(STUCK_IN_C) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM


def test_a_programs_own_handler_decides():
    program = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "print('ready', flush=True)\n"
        "for _ in range(600): time.sleep(0.1)"  # a signal just before a sleep does not shorten it
    )
    with start(program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 42


def test_the_program_inherits_no_blocked_signal():
    program = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True)"
    with start(program) as process:
        assert process.communicate(timeout=SECONDS)[0] == "[]\n"


def test_any_other_process_stays_as_it_is():
    code = f"import sys, os; sys.path.insert(0, {str(TOOLS)!r}); before = os.getpid()\n"
    code += "import fleet_pid1; fleet_pid1.step_aside(); print(before == os.getpid())"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert ended.stdout == "True\n"
