"""Helpers for tests with real processes: free ports, waiting with a deadline, who is alive, and parents."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def wait_for(probe: Callable[[], T], what: str, *, seconds: float = 15.0) -> T:
    """Return the first true value of `probe`, or fail by saying what was awaited."""
    deadline = time.monotonic() + seconds
    while not (value := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which only waits to be noticed, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(pid: int) -> int:
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def cpu_seconds(pid: int) -> float:
    """Return how much CPU a process has taken, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ports in a row that nothing listens on now, below the range for outgoing connections."""
    start = 21000 + os.getpid() * 17 % 9000  # test processes that run side by side look in different places
    for first in range(start, 31000, count):
        sockets: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server((host, port)))  # noqa: PERF401 (to be closed after a failure)
        except OSError:
            continue
        finally:
            for opened in sockets:
                opened.close()
        return list(range(first, first + count))
    raise AssertionError(f"no {count} free ports in a row on {host}")
