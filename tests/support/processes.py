"""Helpers for tests with real processes: free ports, waits with a deadline, and process information."""

import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

HOST = "127.0.0.1"
CLAIMED = 200
"""The number of ports that a test process reserves; it listens on the first of them."""
PORTS = range(21000, 31000, CLAIMED)
"""The first ports of the ranges, which are below the ports of outgoing connections."""


def wait_for(probe: Callable[[], T], what: str, *, seconds: float = 60.0) -> T:
    """Wait until `probe` returns a true value, and return it; fail after a timeout."""
    deadline = time.monotonic() + seconds
    while not (value := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Return whether a process is running and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(pid: int) -> int:
    """Return the id of the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def name_of(pid: int) -> str:
    """Return the process name that pgrep and pkill use."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, including all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Return consecutive free ports from a range that this process has reserved."""
    _, claimed = _claim()
    for first in range(claimed + 1, claimed + CLAIMED - count + 1, count):
        sockets: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server((host, port)))  # noqa: PERF401 (closed after a failure)
        except OSError:
            continue
        finally:
            for opened in sockets:
                opened.close()
        return list(range(first, first + count))
    raise AssertionError(f"no {count} free ports in a row on {host} from {claimed + 1} on")


@functools.cache
def _claim() -> tuple[socket.socket, int]:
    """Reserve a range of ports for this process by listening on the first port."""
    for first in PORTS:
        with contextlib.suppress(OSError):
            return socket.create_server((HOST, first)), first
    raise AssertionError(f"every {CLAIMED}th port of {HOST} from {PORTS.start} to {PORTS.stop} is in use")


def let_programs_heed_signals() -> None:
    """Reset SIGHUP and SIGINT in programs that tests start, if this process ignores the signals.

    nohup makes a process ignore SIGHUP, and a shell makes background processes ignore SIGINT. Programs
    inherit ignored signals, but not handlers.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
