"""Programs of tests that are forked end as those do that are started."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.forked_python import ForkedPython, program_of, relay
from tests.support.processes import alive, wait_for

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

PRELUDE = """
import atexit, os, sys, threading, time
atexit.register(print, "at its end")
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("print('said', end='')", id="its-last-line"),
        pytest.param(
            "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", id="a-thread"
        ),
        pytest.param("sys.exit()", id="exit"),
        pytest.param("sys.exit(3)", id="a-status"),
        pytest.param("sys.exit(-1)", id="a-negative-status"),
        pytest.param("sys.exit('why')", id="words"),
        pytest.param("raise ValueError('found')", id="an-exception"),
        pytest.param("sys.excepthook = lambda *_: print('hooked')\n1 / 0", id="a-hook-for-exceptions"),
        pytest.param("raise KeyboardInterrupt", id="an-interrupt"),
        pytest.param("os.kill(os.getpid(), 9)", id="a-signal"),
        pytest.param("os._exit(4)", id="at-once"),
    ],
)
def test_a_forked_program_ends_as_a_started_one(tmp_path: Path, end: str):
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + end)
    started = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )
    with (tmp_path / "output").open("wb") as output, (tmp_path / "errors").open("wb") as errors:
        forked = ForkedPython(script, env=os.environ, output=output, errors=errors)
    assert forked.wait(60) == started.returncode
    assert (tmp_path / "output").read_text() == started.stdout
    said = (tmp_path / "errors").read_text()
    assert said.splitlines()[-1:] == started.stderr.splitlines()[-1:]  # a traceback has other frames


def relayed(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["python", *arguments], env=os.environ | relay(), stdout=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize("end", ["print('said')", "sys.exit(3)", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_a_relayed_program_ends_as_a_started_one(tmp_path: Path, how: str, end: str):
    source = PRELUDE + "print(sys.argv[1:], 'torch' in sys.modules)\n" + end
    (tmp_path / "program.py").write_text(source)
    words = {"-c": ("-c", source), "-m": ("-m", "program"), "script": ("program.py",)}[how]
    started = subprocess.run(
        [sys.executable, *words, "more"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False
    )
    with relayed(*words, "more", cwd=tmp_path) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == started.returncode
    assert output == started.stdout.replace("False", "True")


def test_a_relayed_program_gets_signals_and_dies_with_what_stands_for_it():
    program = "import os, signal, time\nsignal.signal(15, lambda *_: print('TERM', flush=True))\n"
    program += "print(os.getpid(), flush=True)\nwhile True: time.sleep(0.1)"
    with relayed("-u", "-c", program) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.terminate()
        assert process.stdout.readline() == "TERM\n"
        assert program_of(process.pid) == pid == program_of(pid)
        process.kill()
        wait_for(lambda: not alive(pid), "the end of the program")
