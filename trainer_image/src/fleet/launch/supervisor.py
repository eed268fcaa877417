"""Supervises a set of processes: starts, logs, monitors and stops them together.

`decide` implements these rules, in order, as a pure function of the state of the processes:

1. The first process that ends with a status other than 0 is the failure: all other processes are stopped, and
   the failed process's status becomes the launcher's.
2. To stop the processes, the launcher sends each of them SIGTERM. STOP_SECONDS later, or as soon as all have
   ended, it sends SIGKILL to every remaining process, including children. If the launcher itself was stopped,
   the processes get the launcher's grace period instead of STOP_SECONDS.
3. When every worker has ended with status 0, the servers get SERVER_SECONDS to end by themselves. Stopping a
   server after that is not a failure, because training has completed.

Every process that a launcher has started ends with the launcher:

- Each process leads a separate session. SIGKILL thus reaches its whole group, and a Ctrl-C in the terminal
  reaches only the launcher, which stops the others in order.
- SIGTERM is sent only to the process itself, as the kubelet sends it only to a container's first process: a
  process that saves may still need its children, such as the workers of a DataLoader.
- The launcher is a child subreaper: orphaned children of a process, even in another session, become children
  of the launcher, which kills them at the end.
- If the launcher itself is killed by SIGKILL, the kernel kills its processes, each of which has requested
  SIGKILL on its parent's death (PR_SET_PDEATHSIG). Their own children may survive outside a container.
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final

from fleet.errors import ConfigurationError
from fleet.process import termination

__all__ = ["STOP_SECONDS", "Command", "run"]

STOP_SECONDS: Final = 3.0
SERVER_SECONDS: Final = 30.0
KILL_SECONDS: Final = 10.0
"""How long a process may take to end after SIGKILL: the kernel may have to free many GB of memory."""
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
TAIL_LINES: Final = 20
TAIL_BYTES: Final = 65536
MAX_READS: Final = 64
TRACEBACK: Final = "Traceback (most recent call last):"
RANK: Final = re.compile(r"\[rank\d+\]: ?", re.ASCII)
"""The prefix that torch's exception hook puts before each line once there is a process group."""
EXCEPTION: Final = re.compile(r"[^\W\d][\w.<>]*(?::.*)?")
IGNORED: Final = ("Exception ignored in", "Error in atexit._run_exitfuncs")
ABORTED: Final = 128 + signal.SIGABRT
"""The exit status of an aborted process, as after an exception that leaves gloo's threads running."""

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Command:
    """A process to start: its name for messages, its command line, and the name of its log file."""

    name: str
    is_server: bool
    argv: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)
    log_name: str = ""


@dataclass
class Process:
    """A started process and its exit status.

    `status` is its exit status, 128 + n after signal n, and None while it runs. `ended_at` is in seconds of
    the monotonic clock.
    """

    command: Command
    popen: subprocess.Popen[bytes]
    log_path: Path | None = None
    status: int | None = None
    ended_at: float | None = None
    errors: bytes = b""
    """The last part of the process's standard error, if the launcher forwards it."""

    def forward_errors(self) -> bool:
        """Copy the process's pending standard error to the launcher's; return whether there was any."""
        if self.popen.stderr is None:
            return False
        try:
            data = os.read(self.popen.stderr.fileno(), TAIL_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.popen.stderr.close()
            self.popen.stderr = None
            return False
        self.errors = (self.errors + data)[-TAIL_BYTES:]
        sys.stderr.buffer.write(data)
        sys.stderr.flush()
        return True

    def last_lines(self) -> list[str]:
        """Return the last lines of the process's log, or of its standard error if it has no log."""
        if self.log_path is not None:
            tail = b""
            # The script may have removed its log folder, which must not change the launcher's exit status.
            with contextlib.suppress(OSError), self.log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                tail = file.read(TAIL_BYTES)
        else:
            for _ in range(MAX_READS):  # bounded, because children left behind by the process may still write
                if not self.forward_errors():
                    break
            tail = self.errors
        return tail.decode(errors="replace").splitlines()[-TAIL_LINES:]

    def poll(self) -> None:
        """Record the process's exit status and exit time once it has exited."""
        if self.status is None and (code := self.popen.poll()) is not None:
            self.status = code if code >= 0 else 128 - code
            self.ended_at = time.monotonic()

    def terminate(self) -> None:
        """Send SIGTERM to the process but not to its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Called only before the process is reaped, so its id cannot belong to another process.
            os.kill(self.popen.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        """Send SIGKILL to the process's group, if the group still exists."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Stop:
    """The stop of all processes, which began at `since` and may last up to `seconds`."""

    reason: str
    status: int
    since: float
    seconds: float = STOP_SECONDS


class Action(Enum):
    """The launcher's next action."""

    WAIT = auto()
    STOP = auto()
    END = auto()
    """Kill all processes that are still running, and exit."""


@dataclass(frozen=True)
class Decision:
    """The launcher's next action, with the reason for it.

    `failed` is the process that caused a stop, if one did. `until` is when the next decision is
    due even if no process ends.
    """

    action: Action
    reason: str = ""
    status: int = 0
    failed: Process | None = None
    until: float | None = None


def decide(processes: Sequence[Process], stop: Stop | None, now: float) -> Decision:
    """Return the launcher's next action.

    Parameters
    ----------
    processes
        Every process that was started.
    stop
        The stop that has begun, if one has.
    now
        Seconds of the clock of `ended_at` and `since`.
    """
    running = _running(processes)
    if stop is not None:
        deadline = stop.since + stop.seconds
        if not running or now >= deadline:
            return Decision(Action.END, stop.reason, stop.status)
        return Decision(Action.WAIT, stop.reason, stop.status, until=deadline)
    failures = [each for each in processes if each.status not in (None, 0)]
    if failures:
        first = min(failures, key=lambda each: each.ended_at or 0.0)
        status, name = first.status or 0, first.command.name
        how = f"failed with exit status {status}"
        if _is_of_signal(status):
            how = f"was ended by signal {status - 128}"
        return Decision(Action.STOP, f"{name} {how}", status, first)
    if not running:
        return Decision(Action.END)
    if any(not each.command.is_server for each in running):
        return Decision(Action.WAIT)
    done = max((each.ended_at or 0.0 for each in processes if not each.command.is_server), default=now)
    if now < done + SERVER_SECONDS:
        return Decision(Action.WAIT, until=done + SERVER_SECONDS)
    names = ", ".join(each.command.name for each in running)
    return Decision(
        Action.STOP, f"every worker ended with status 0; {names} still ran {SERVER_SECONDS:g} s later"
    )


def _is_of_signal(status: int) -> bool:
    """Return whether an exit status has the form 128 + n, which means that signal n ended the process."""
    return 128 < status < 128 + signal.NSIG


def _running(processes: Sequence[Process]) -> list[Process]:
    return [each for each in processes if each.status is None]


class _Signals:
    """The signals that the launcher handles, delivered through a readable descriptor."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # SIGCHLD interrupts the wait as soon as a process has ended.
        numbers = [signal.SIGCHLD, signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup makes a process ignore SIGHUP
            numbers.append(signal.SIGHUP)
        self._handlers = {number: signal.signal(number, self._ignore) for number in numbers}

    @staticmethod
    def _ignore(number: int, frame: FrameType | None) -> None:
        """Do nothing; Python reports a signal through the wake-up descriptor only if a handler is set."""

    def wait(self, seconds: float | None, started: Sequence[Process] = ()) -> list[int]:
        """Wait for signals or output on standard error; forward the output, and return the stop signals."""
        errors = {each.popen.stderr.fileno(): each for each in started if each.popen.stderr is not None}
        # Not select(), which refuses descriptors from 1024 on: a node may have as many workers.
        ready = select.poll()
        for descriptor in (self._reader, *errors):
            ready.register(descriptor, select.POLLIN)
        for descriptor, _ in ready.poll(None if seconds is None else seconds * 1000):
            if descriptor in errors:
                errors[descriptor].forward_errors()
        try:
            received = os.read(self._reader, 1024)
        except BlockingIOError:
            return []
        return [number for number in received if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]

    def close(self) -> None:
        """Restore the previous signal handlers."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)


def run(commands: Sequence[Command], log_dir: Path | None, grace_seconds: float = STOP_SECONDS) -> int:
    """Start every command, wait until all have ended, and leave no process running.

    Parameters
    ----------
    commands
        The processes to start, in this order.
    log_dir
        The folder of the log files, one for each process; with None all processes share the launcher's
        output.
    grace_seconds : float
        How long the processes may take to end after a signal to the launcher.

    Returns
    -------
    int
        0, or the exit status of the first process that failed, or 128 + n after signal n to the launcher; 1
        if nothing failed but a process could not be killed.

    Raises
    ------
    ConfigurationError
        The log directory cannot be written.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signals = _Signals()
    started: list[Process] = []
    try:
        for command in commands:
            started.append(_start(command, log_dir, grace_seconds))  # noqa: PERF401 (a failure needs the ones before it)
        status = _watch(started, signals, grace_seconds)
    finally:
        left = _end_all(started, signals)
        signals.close()
    return status or int(bool(left))


def _watch(started: Sequence[Process], signals: _Signals, grace_seconds: float) -> int:
    """Carry out decisions until the last process has exited; return the exit status."""
    stop: Stop | None = None
    while True:
        _reap(started)
        now = time.monotonic()
        decision = decide(started, stop, now)
        if decision.action is Action.END:
            return decision.status
        if decision.action is Action.STOP:
            _explain(decision)
            stop = Stop(decision.reason, decision.status, now)
            for running in _running(started):
                running.terminate()
            continue
        # At least a moment, so that rounding cannot make this loop spin.
        waiting = None if decision.until is None else max(0.05, decision.until - now)
        for number in signals.wait(waiting, started):
            name = signal.Signals(number).name
            if stop is None:
                _say(f"{name}: stopping every process")
                stop = Stop(name, 128 + number, time.monotonic(), grace_seconds)
                for running in _running(started):
                    running.terminate()
            elif stop.status == 128 + number:
                _say(f"{name} again: killing every process")
                for running in _running(started):
                    running.kill_group()


def _start(command: Command, log_dir: Path | None, grace_seconds: float) -> Process:
    path = None if log_dir is None else log_dir / command.log_name
    # A process whose standard error is a terminal keeps the terminal, for its colours and width.
    errors = None if sys.stderr.isatty() else subprocess.PIPE
    with _output(path) as output:
        process = subprocess.Popen(
            command.argv,
            # A script that saves on SIGTERM must have ended before this launcher kills it.
            env={**command.environ, "FLEET_GRACE_SECONDS": str(int(grace_seconds))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors if output is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),  # safe here: the launcher has one thread
        )
    if process.stderr is not None:
        os.set_blocking(process.stderr.fileno(), False)
    return Process(command, process, path)


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except OSError as error:
        raise ConfigurationError(
            f"--log_dir is {str(path.parent)!r}, where {path.name} cannot be written ({error.strerror}); "
            "expected a directory that can be created or written"
        ) from error
    with file:
        yield file


def _die_with(launcher: int) -> Callable[[], None] | None:
    """Return a function that makes the kernel kill the calling process when the launcher dies."""
    if _libc is None:
        return None
    prctl = _libc.prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # the launcher died before the request
            os._exit(128 + signal.SIGKILL)

    return ask


def _end_all(started: Sequence[Process], signals: _Signals) -> list[int]:
    """Kill and reap all processes and their orphaned children; return the ids of those that survive."""
    inherits = _children() is not None  # otherwise leftover children are known only by their group
    for running in started:
        if running.status is None or not inherits:
            running.kill_group()
    deadline = time.monotonic() + KILL_SECONDS
    while left := _reap(started):
        if time.monotonic() >= deadline:
            names = {running.popen.pid: running.command.name for running in started}
            for pid in left:
                _say(_unkillable(pid, names.get(pid, "a child that a process left behind")))
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        signals.wait(0.05, started)
    for running in started:
        running.last_lines()  # forwards the rest
    return left


def _reap(started: Sequence[Process]) -> list[int]:
    """Reap exited processes; return the ids of those still running, including adopted children."""
    for running in started:
        running.poll()
    left = {running.popen.pid for running in started if running.status is None} | (_children() or set())
    for pid in left - {running.popen.pid for running in started}:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
    return sorted(left)


def _children() -> set[int] | None:
    """Return the ids of this process's children, or None if the system does not list them."""
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return None


def _unkillable(pid: int, name: str) -> str:
    state = "in an unknown state"
    with contextlib.suppress(OSError, IndexError):
        state = f"in state {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]}"
    return (
        f"process {pid} ({name}) still runs {KILL_SECONDS:g} s after SIGKILL, {state}; in state D the kernel "
        "waits for a disk, a file server or a device: see its log (dmesg), and end that wait"
    )


def _explain(decision: Decision) -> None:
    """Print why all processes are stopped; after a failure, also write the termination message."""
    failed = decision.failed
    lines = [] if failed is None else failed.last_lines()  # forwards its errors first
    _say(f"{decision.reason}; stopping the others")
    if failed is None:
        return
    cause = ""
    killed = _is_of_signal(decision.status)
    if not killed or decision.status == ABORTED:  # the log of a killed process does not explain its end
        cause = _exception(lines)
    if not cause and not killed:
        cause = next((line.strip() for line in reversed(lines) if line.strip()), "")
    sentence = f"{decision.reason}: {cause}" if cause else decision.reason
    termination.write_failure(sentence, os.environ, log="\n".join(lines))
    if failed.log_path is None:
        return
    _say(f"the end of {failed.log_path}:")
    for line in lines:
        print(f"  {line}", file=sys.stderr, flush=True)


def _exception(lines: Sequence[str]) -> str:
    """Return the exception line of the last traceback, without torch's rank prefix."""
    exception, inside, above = "", True, ""
    for line in (RANK.sub("", each, count=1) for each in lines):
        if line.endswith(TRACEBACK):
            inside = not above.startswith(IGNORED)
        elif inside and above.startswith(" ") and EXCEPTION.fullmatch(line):
            exception, inside = line, False
        above = line
    return exception


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
