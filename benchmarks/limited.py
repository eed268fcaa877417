"""Processes that run timed batches of steps under a memory limit, and a disk speed test."""

import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

__all__ = ["PROGRAM_BYTES", "Cgroup", "Process", "anonymous_bytes", "random_reads"]

PROGRAM_BYTES: Final = 32 << 20
"""Memory for program pages, and for the kernel's tables of files and addresses."""
_READ_SECONDS: Final = 2.0
_CGROUPS: Final = Path("/sys/fs/cgroup")


class Process:
    """A process that runs a batch of steps on request and returns the time taken.

    Parameters
    ----------
    arguments : sequence of str
        The module and its arguments.
    group : Cgroup, optional
        The control group in which the process starts.
    """

    def __init__(self, arguments: Sequence[str], group: "Cgroup | None" = None) -> None:
        command = [sys.executable, "-m", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if group is not None:
            group.add(self._process.pid)
        self.last: dict[str, float] = {}
        """The measurements of the last turn."""
        self.bytes = 0
        """Anonymous memory after the last turn, in bytes."""

    def turn(self, steps: int) -> float:
        """Run the given number of steps and return the seconds taken."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with {self._process.wait()}; see above")
        self.last = json.loads(line)
        self.bytes = int(self.last["bytes"])
        return float(self.last["seconds"])

    def close(self) -> None:
        """End the process and wait until it has exited."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Cgroup:
    """A control group, of version 1 or 2, with a memory limit.

    Parameters
    ----------
    name : str
    """

    def __init__(self, name: str) -> None:
        second = _CGROUPS / "cgroup.controllers"
        try:
            if second.exists() and "memory" in second.read_text().split():
                (_CGROUPS / "cgroup.subtree_control").write_text("+memory")
                parent, self._file = _CGROUPS, "memory.max"
            else:
                parent, self._file = _CGROUPS / "memory", "memory.limit_in_bytes"
            self._path = parent / f"fleet-{name}-{os.getpid()}"
            self._path.mkdir()
        except OSError as error:
            raise SystemExit(
                f"this benchmark limits the memory of a process by a cgroup, and cannot create one: {error}; "
                "run it as root with a writable /sys/fs/cgroup"
            ) from error

    def add(self, process: int) -> None:
        """Move a process into the group."""
        (self._path / "cgroup.procs").write_text(str(process))

    def limit(self, num_bytes: int) -> None:
        """Limit the memory of the group, which includes page cache."""
        (self._path / self._file).write_text(str(num_bytes))

    def close(self) -> None:
        """Remove the group, whose processes must have ended."""
        self._path.rmdir()


def anonymous_bytes() -> int:
    """Return this process's anonymous memory in bytes."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def random_reads(directory: str, threads: int, num_bytes: int = 1 << 30) -> float:
    """Return the rate of random 4 KiB disk reads from several threads, without the page cache."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for _ in range(num_bytes >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        counts = [0] * threads
        end = time.monotonic() + _READ_SECONDS

        def read(thread: int) -> None:
            room, random = mmap.mmap(-1, 4096), np.random.default_rng(thread)
            while time.monotonic() < end:
                os.preadv(descriptor, [room], int(random.integers(num_bytes >> 12)) << 12)
                counts[thread] += 1

        readers = [threading.Thread(target=read, args=(each,)) for each in range(threads)]
        for each in readers:
            each.start()
        for each in readers:
            each.join()
        os.close(descriptor)
    return sum(counts) / _READ_SECONDS
