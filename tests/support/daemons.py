"""Background programs of tests, which the kernel kills if the test process dies."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from tests.support.processes import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

START_SECONDS = 150.0
STOP_SECONDS = 5.0

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Daemons:
    """The background programs of a test system, whose logs are written to one folder.

    Parameters
    ----------
    folder : Path
        The folder of the logs, each named ``NAME.log``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def run(self, name: str, program: Path, *arguments: str) -> None:
        """Start a program that ends no later than this process."""
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        self._processes.append((name, process))

    def kill(self, name: str) -> None:
        """Kill the program with the given name and wait for its end."""
        (process,) = [process for each, process in self._processes if each == name]
        process.kill()
        process.wait()
        self._processes = [each for each in self._processes if each[1] is not process]

    def stop(self) -> None:
        """Stop all programs, in the reverse of the order in which they were started."""
        for _, process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
        for _, process in reversed(self._processes):
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time that each running program has used."""
        return {name: cpu_seconds(process.pid) for name, process in self._processes}

    def until(self, probe: Callable[[], bool], what: str) -> None:
        """Poll until `probe` is true; fail if one of the programs ends first."""
        deadline = time.monotonic() + START_SECONDS
        while not probe():
            for name, process in self._processes:
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended while {what} was awaited:\n{self._log(name)}")
            if time.monotonic() > deadline:
                name = self._processes[-1][0]
                raise AssertionError(f"waited {START_SECONDS:g} s in vain for {what}:\n{self._log(name)}")
            time.sleep(0.05)

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends.

    The kernel watches the thread, not the process: start a long-lived program from the main thread.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
