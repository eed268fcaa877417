"""Run a set of processes to their common end: start, log, watch, stop. The decisions are `decision.py`'s.

What a launcher has started ends with it:

- Each process leads a session of its own, so that SIGKILL reaches its whole group, and a Ctrl-C in the
  terminal reaches only the launcher, which stops the others in order.
- SIGTERM goes to the process alone, as the kubelet sends it to a container's first process alone: one that
  saves in its grace may need its children for that, the workers of a DataLoader for example.
- The launcher is a child subreaper: what a process leaves behind, even in another session, becomes the
  launcher's child and is killed at the end.
- A launcher that is itself killed with SIGKILL can do nothing any more, so the kernel does it: each process
  asked for SIGKILL on its parent's death (PR_SET_PDEATHSIG). What those have started themselves is not told,
  and may go on, outside a container.
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
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from fleet.errors import ConfigurationError
from fleet.launch.decision import STOP_SECONDS, Action, Decision, Observed, Stop, decide, is_of_signal
from fleet.process import termination

__all__ = ["Command", "last_lines", "run"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TAIL_LINES = 20
TAIL_BYTES = 65536
MOST_READS = 64
HEAD = "Traceback (most recent call last):"
RANK = re.compile(r"\[rank\d+\]: ?", re.ASCII)
"""What torch's own hook puts before each line of an exception, where there is a process group."""
EXCEPTION = re.compile(r"[^\W\d][\w.<>]*(?::.*)?")
PASSED_OVER = ("Exception ignored in", "Error in atexit._run_exitfuncs")
ABORTED = 128 + signal.SIGABRT
"""The end of a process whose exception left gloo's threads behind."""
KILL_SECONDS = 10.0
"""How long a process may take to end after SIGKILL: the kernel gives back its memory, many GB perhaps."""

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Command:
    """One process to start: its name in messages, its log file's name, and what it runs."""

    name: str
    is_server: bool
    argv: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)
    log_name: str = ""


@dataclass
class _Running:
    """A started process and what became of it."""

    command: Command
    process: subprocess.Popen[bytes]
    log_path: Path | None
    status: int | None = None
    ended_at: float | None = None
    errors: bytes = b""
    """The end of its standard error, where that passes through the launcher."""

    def pass_errors_on(self) -> bool:
        """Write what has come of its standard error to ours; return whether there was something."""
        if self.process.stderr is None:
            return False
        try:
            data = os.read(self.process.stderr.fileno(), TAIL_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.process.stderr.close()
            self.process.stderr = None
            return False
        self.errors = (self.errors + data)[-TAIL_BYTES:]
        sys.stderr.buffer.write(data)
        sys.stderr.flush()
        return True

    def last_lines(self) -> list[str]:
        """Return the end of what it has logged, as far as the launcher can know it."""
        if self.log_path is not None:
            return last_lines(self.log_path)
        for _ in range(MOST_READS):  # what it left behind may go on writing
            if not self.pass_errors_on():
                break
        return self.errors.decode(errors="replace").splitlines()[-TAIL_LINES:]

    def poll(self) -> None:
        """Take note of the end, once."""
        if self.status is None and (code := self.process.poll()) is not None:
            self.status = code if code >= 0 else 128 - code
            self.ended_at = time.monotonic()

    def terminate(self) -> None:
        """Tell the process, and not its children, to end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill the process and all of its group; a group that is gone needs no signal."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class _Signals:
    """The signals that the launcher waits for, as a readable descriptor."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        numbers = [signal.SIGCHLD, signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup has us outlive the terminal
            numbers.append(signal.SIGHUP)
        self._handlers = {number: signal.signal(number, self._ignore) for number in numbers}

    @staticmethod
    def _ignore(number: int, frame: FrameType | None) -> None:
        """Only the wake-up descriptor is of interest; a handler must exist for it to be written."""

    def wait(self, seconds: float | None, started: Sequence[_Running] = ()) -> list[int]:
        """Return the stop signals received by the end of the wait, which any signal ends.

        So does whatever one of the processes writes to its standard error, which is passed on.
        """
        errors = {each.process.stderr.fileno(): each for each in started if each.process.stderr is not None}
        readable, _, _ = select.select([self._reader, *errors], [], [], seconds)
        for descriptor in readable:
            if descriptor in errors:
                errors[descriptor].pass_errors_on()
        try:
            received = os.read(self._reader, 1024)
        except BlockingIOError:
            return []
        return [number for number in received if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)


def run(commands: Sequence[Command], log_dir: Path | None, grace_seconds: float = STOP_SECONDS) -> int:
    """Start every command, wait for their common end, and leave nothing running.

    Parameters
    ----------
    commands
        What to start, in this order.
    log_dir
        Where each process's output goes, to a file named by its command; None lets all share ours.
    grace_seconds : float
        How long what a signal to the launcher stops may take for it.

    Returns
    -------
    int
        0, or the exit status of the first process that failed, or 128 + n after a signal n to the launcher;
        1 if nothing failed, and something could not be killed.

    Raises
    ------
    ConfigurationError
        The log directory cannot be written.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signals = _Signals()
    started: list[_Running] = []
    try:
        for command in commands:
            started.append(_start(command, log_dir, grace_seconds))  # noqa: PERF401 (those before a failure must be known)
        status = _watch(started, signals, grace_seconds)
    finally:
        left = _end_all(started, signals)
        signals.close()
    return status or int(bool(left))


def _watch(started: Sequence[_Running], signals: _Signals, grace_seconds: float) -> int:
    """Act on the decisions until the last process has ended; return the exit status."""
    stop: Stop | None = None
    while True:
        _unreaped(started)
        observed = [Observed(r.command.name, r.command.is_server, r.status, r.ended_at) for r in started]
        now = time.monotonic()
        decision = decide(observed, stop, now)
        if decision.action is Action.END:
            return decision.status
        if decision.action is Action.STOP:
            _explain(decision, started)
            stop = Stop(decision.reason, decision.status, now)
            for running in _still_running(started):
                running.terminate()
            continue
        waiting = None if decision.until is None else max(0.05, decision.until - now)
        for number in signals.wait(waiting, started):
            name = signal.Signals(number).name
            if stop is None:
                _say(f"{name}: stopping every process")
                stop = Stop(name, 128 + number, time.monotonic(), grace_seconds)
                for running in _still_running(started):
                    running.terminate()
            elif stop.status == 128 + number:
                _say(f"{name} again: killing every process")
                for running in _still_running(started):
                    running.kill_group()


def _start(command: Command, log_dir: Path | None, grace_seconds: float) -> _Running:
    path = None if log_dir is None else log_dir / command.log_name
    errors = None if sys.stderr.isatty() else subprocess.PIPE  # a terminal's colours and width are worth more
    with _output(path) as output:
        process = subprocess.Popen(
            command.argv,
            env={**command.environ, "FLEET_GRACE_SECONDS": str(int(grace_seconds))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors if output is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),  # safe here: the launcher has one thread
        )
    if process.stderr is not None:
        os.set_blocking(process.stderr.fileno(), False)
    return _Running(command, process, path)


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
    """Return what a new process does before it becomes its program: ask to die with the launcher."""
    if _libc is None:
        return None
    prctl = _libc.prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the request was made
            os._exit(128 + signal.SIGKILL)

    return ask


def _still_running(started: Sequence[_Running]) -> list[_Running]:
    return [running for running in started if running.status is None]


def _end_all(started: Sequence[_Running], signals: _Signals) -> list[int]:
    """Kill and reap what still runs, and what the processes left behind; return and name what stays."""
    inherits = _children() is not None  # else what an ended process left behind is known by its group only
    for running in started:
        if running.status is None or not inherits:
            running.kill_group()
    deadline = time.monotonic() + KILL_SECONDS
    while left := _unreaped(started):
        if time.monotonic() >= deadline:
            names = {running.process.pid: running.command.name for running in started}
            for pid in left:
                _say(_unkillable(pid, names.get(pid, "which one of the processes left behind")))
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        signals.wait(0.05, started)
    for running in started:
        running.last_lines()  # passes the rest on
    return left


def _unreaped(started: Sequence[_Running]) -> list[int]:
    """Reap who has ended; return who has not. Whom a process left behind is the subreaper's child: ours."""
    for running in started:
        running.poll()
    left = {running.process.pid for running in started if running.status is None} | (_children() or set())
    for pid in left - {running.process.pid for running in started}:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
    return sorted(left)


def _children() -> set[int] | None:
    """Return this process's children; None where the system does not tell them."""
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


def _explain(decision: Decision, started: Sequence[_Running]) -> None:
    """Say why everything stops; for a failure with the end of its log, and as the termination message."""
    failed = next((running for running in started if running.command.name == decision.failed), None)
    lines = [] if failed is None else failed.last_lines()
    _say(f"{decision.reason}; stopping the others")
    if failed is None:
        return
    said = ""
    if not is_of_signal(decision.status) or decision.status == ABORTED:  # else its log is not about its end
        said = _exception(lines)
    if not said and not is_of_signal(decision.status):
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    sentence = f"{decision.reason}: {said}" if said else decision.reason
    termination.write_failure(sentence, os.environ, log="\n".join(lines))
    if failed.log_path is None:
        return
    _say(f"the end of {failed.log_path}:")
    for line in lines:
        print(f"  {line}", file=sys.stderr, flush=True)


def _exception(lines: Sequence[str]) -> str:
    """Return what the last traceback says, without torch's prefix; its head may be further up."""
    said, inside, above = "", True, ""
    for line in (RANK.sub("", each, count=1) for each in lines):
        if line.endswith(HEAD):
            inside = not above.startswith(PASSED_OVER)
        elif inside and above.startswith(" ") and EXCEPTION.fullmatch(line):
            said, inside = line, False
        above = line
    return said


def last_lines(path: Path) -> list[str]:
    """Return a log's last lines; a long log is not read for them."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-TAIL_LINES:]


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
