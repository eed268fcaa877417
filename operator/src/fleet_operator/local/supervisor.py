"""The supervisor of a local run, which starts the pods' processes and outlives all of them.

It is started once per run, as a file and with only the standard library (``python -I -S supervisor.py``),
so it starts in some 40 ms and shares nothing with the runner except the socket on its standard input::

    runner ──socket── supervisor ──socket── keeper of pserver-0 ── main process ── its descendants
                               ╰─socket── keeper of trainer-0 ── main process ── its descendants

- A *keeper* plays the role of a pod's container: it is a fork of the supervisor, and a child subreaper. The
  processes that the main process leaves behind, including double forks and new sessions, become the keeper's
  children. When the main process ends, the keeper kills them, as the end of PID 1 empties a container.
- A closed socket is the order to stop. When the runner dies, even by kill -9, the kernel closes its end, and
  the supervisor then closes its sockets to the keepers. When the supervisor itself dies, each keeper sees the
  same. When a keeper dies, its processes become children of the supervisor, which kills them.
- If the runner, the supervisor and the keepers are all killed at once, the kernel kills the main processes
  (PR_SET_PDEATHSIG), and only the descendants of these may survive. The helpers' process names differ from
  the runner's, so that killing every process named fleetjob spares them.
- Stopping means SIGTERM, a grace period, then SIGKILL until nothing is left.

The protocol is one JSON object per line. Orders: ``{"op": "start", "id", "argv", "env", "cwd", "log"}``
and ``{"op": "stop", "id", "grace"}``. Reports: ``{"event": "started", "id", "pid"}`` and
``{"event": "exited", "id", "code", "error"}``, where a code above 128 is 128 + the signal, as in a pod's
status, and ``error`` is the sentence for a process that could not start.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from io import RawIOBase

GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL after the runner's death
KILL_SECONDS = 30.0  # a process that survives SIGKILL for longer is stuck in the kernel
LOG_BYTES = 1 << 16  # bytes of output per read, the capacity of a pipe
START_ERROR = 128  # the exit code that container runtimes give to a command that cannot be started
SHOWN_CHARACTERS = 300  # of the name of a program that cannot be started
KILLED_KEEPER = 128 + signal.SIGKILL  # the exit code of a process that ended with its keeper

# Options of prctl(2) from linux/prctl.h, which the standard library lacks.
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def become_subreaper(name: str) -> None:
    """Make this process adopt orphaned descendants, if the system (Linux) supports this."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot become a child subreaper: {os.strerror(error)}")


def die_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` that ends a process with its parent, if the system (Linux) supports this.

    The kernel kills the process when the parent's thread, here the only one, ends.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl took effect
            os._exit(KILLED_KEEPER)

    return ask


def _parents_from_proc() -> Iterator[tuple[int, int]]:
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path("/proc", entry.name, "stat").read_bytes()
        except OSError:
            continue  # the process has ended meanwhile
        # The second field is the command's name in parentheses. The name may contain spaces and parentheses.
        state, parent = stat[stat.rindex(b")") + 2 :].split(maxsplit=2)[:2]
        if state not in b"ZX":
            yield int(entry.name), int(parent)


def _parents_from_ps() -> Iterator[tuple[int, int]]:
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,stat="], stdout=subprocess.PIPE, text=True) as ps:
        listing = ps.communicate()[0]
    for line in listing.splitlines():
        pid, parent, state = line.split(maxsplit=2)
        if int(pid) != ps.pid and not state.startswith("Z"):
            yield int(pid), int(parent)


def descendants(root: int, *, without: Container[int] = ()) -> list[int]:
    """Return all living descendants of `root`, in any session, parents first.

    Processes in `without` and their descendants are left out.
    """
    children: dict[int, list[int]] = {}
    for pid, parent in _parents_from_proc() if sys.platform == "linux" else _parents_from_ps():
        if pid not in without:
            children.setdefault(parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:  # the list grows during the iteration: breadth-first search
        found += children.get(pid, ())
    return found


def send_signal(pids: list[int], signum: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue


class Wake:
    """A selectable object that becomes readable when a child ends or a stop signal arrives.

    It uses handlers, not SIG_IGN, which started programs would inherit.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda *_: None)

    def clear(self) -> bytes:
        """Return the numbers of the signals received since the last call, as bytes."""
        try:
            return os.read(self.reader, 4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Close the descriptors."""
        signal.set_wakeup_fd(-1)
        os.close(self.reader)
        os.close(self._writer)


def reap() -> Iterator[tuple[int, int]]:
    """Yield the pid and exit code of each child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        yield pid, code if code >= 0 else 128 - code


class Channel:
    """One end of a socket that transfers one JSON object per line."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    def fileno(self) -> int:
        """Return the file descriptor, as select requires."""
        return self.sock.fileno()

    def receive(self) -> list[dict[str, Any]] | None:
        """Read once; return the messages of the completed lines, or None if the peer is gone."""
        try:
            data = self.sock.recv(1 << 20)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; a closed peer is ignored, because `receive` reports it."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return


def kill_all(wake: Wake, *, without: Container[int] = ()) -> dict[int, int]:
    """Kill all descendants of this process; return the exit codes of its children."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        alive = descendants(os.getpid(), without=without)
        send_signal(alive, signal.SIGKILL)
        codes.update(reap())
        if not alive or time.monotonic() > deadline:
            return codes
        # Use a time-out, because no signal reports that a descendant has forked.
        select.select([wake.reader], [], [], 0.02)
        wake.clear()


class Log:
    """The log file of a process, with a timestamp before each line.

    Times have the form of ``kubectl logs --timestamps``, to the millisecond. A full disk does not end the
    training: output that does not fit is dropped, and the next line that fits reports the gap.
    """

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._inside_line = False
        self._lost_bytes = 0
        self.ended = False

    def fileno(self) -> int:
        """Return the file descriptor, as select requires."""
        return self._reader

    def take(self) -> bool:
        """Copy available output to the file; return False if there is none."""
        try:
            data = os.read(self._reader, LOG_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.ended = True
            return False
        stamp = _stamp(time.time())
        lines = data.removesuffix(b"\n").replace(b"\n", b"\n" + stamp)
        head, end = b"" if self._inside_line else stamp, b"\n" if data.endswith(b"\n") else b""
        self._inside_line = not end
        self._write(head + lines + end)
        return True

    def _write(self, data: bytes) -> None:
        try:
            if self._lost_bytes:
                self._file.write(b"\n=== %d bytes are missing here: no room ===\n" % self._lost_bytes)
                self._lost_bytes = 0
            written = self._file.write(data)
        except OSError:
            written = 0
        self._lost_bytes += len(data) - (written or 0)


def _stamp(seconds: float) -> bytes:
    day = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{day}.{int(seconds * 1000) % 1000:03d}Z ".encode()


class Keeper:
    """The process that stands in for a pod's container and runs its main process and all descendants."""

    def __init__(self, channel: Channel, order: dict[str, Any]) -> None:
        self._channel = channel
        self._order = order
        self._wake = Wake()
        self._log: Log | None = None
        self._kill_at: float | None = None
        self._exit_code: int | None = None

    def run(self) -> None:
        """Start the main process, and return when it and all of its descendants have ended."""
        become_subreaper("pod-keeper")
        try:
            pid = self._start()
        except OSError as error:
            # A report is one line, and the runner reads lines of up to 64 KiB; a name may be longer.
            named = f": {str(error.filename)[:SHOWN_CHARACTERS]}" if error.filename else ""
            program = repr(self._order["argv"][0][:SHOWN_CHARACTERS])
            self._exited(START_ERROR, f"cannot start {program}: {error.strerror}{named}")
            return
        self._channel.send({"event": "started", "id": self._order["id"], "pid": pid})
        while self._exit_code is None and not self._kill_is_due():
            self._wait(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # without a subreaper, orphans are found by their process group
        codes = kill_all(self._wake)
        while self._log is not None and self._log.take():  # all processes that could write have ended
            pass
        self._exited(codes.get(pid, KILLED_KEEPER) if self._exit_code is None else self._exit_code)

    def _start(self) -> int:
        order = self._order
        self._log = Log(Path(order["log"]).open("ab", buffering=0))  # noqa: SIM115  open until all output is in it
        try:
            process = subprocess.Popen(
                order["argv"],
                env=order["env"],
                cwd=order["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=self._log.writer,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        finally:
            os.close(self._log.writer)
        process.returncode = 0  # reap() collects the process together with its orphans, so Popen must not
        return process.pid

    def _kill_is_due(self) -> bool:
        return self._kill_at is not None and time.monotonic() >= self._kill_at

    def _wait(self, main: int) -> None:
        watched: list[Any] = [self._wake.reader]
        if self._channel.fileno() >= 0:
            watched.append(self._channel)
        if self._log is not None and not self._log.ended:
            watched.append(self._log)
        timeout = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        readable, _, _ = select.select(watched, [], [], timeout)
        told_to_stop = signal.SIGTERM in self._wake.clear()
        if self._log is not None and self._log in readable:
            self._log.take()
        if self._channel in readable:
            orders = self._channel.receive()
            for order in orders or ():
                send_signal([main], signal.SIGTERM)
                self._kill_within(order["grace"])
            if orders is None:
                self._channel.sock.close()
                told_to_stop = True
        if told_to_stop:  # the runner is gone, so children of shells and launchers must get the signal, too
            send_signal(descendants(os.getpid()), signal.SIGTERM)
            self._kill_within(GRACE_SECONDS)
        self._exit_code = dict(reap()).get(main)

    def _kill_within(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    def _exited(self, code: int, error: str | None = None) -> None:
        self._channel.send({"event": "exited", "id": self._order["id"], "code": code, "error": error})


class Supervisor:
    """Relays messages between the runner and the keepers, and kills remaining processes."""

    def __init__(self, runner: Channel) -> None:
        self._runner = runner
        self._wake = Wake()
        self._keepers: dict[str, Channel] = {}
        self._pids: dict[int, str] = {}

    def run(self) -> None:
        """Execute the runner's orders until the runner is gone, then stop all pods."""
        while True:
            watched: list[Any] = [self._runner, self._wake.reader, *self._keepers.values()]
            readable, _, _ = select.select(watched, [], [])
            if signal.SIGTERM in self._wake.clear():
                break
            for identity, keeper in list(self._keepers.items()):
                if keeper in readable:
                    self._forward(identity)
            for pid, _ in reap():
                self._lost(pid)
            if self._runner in readable:
                orders = self._runner.receive()
                if orders is None:
                    break
                for order in orders:
                    self._obey(order)
        self.stop()

    def stop(self) -> None:
        """Stop the pods through their keepers; kill processes that remain after the grace period."""
        for keeper in self._keepers.values():
            keeper.sock.close()
        deadline = time.monotonic() + GRACE_SECONDS + 1.0
        while descendants(os.getpid()) and (left := deadline - time.monotonic()) > 0:
            select.select([self._wake.reader], [], [], min(left, 0.5))
            self._wake.clear()
            list(reap())
        kill_all(self._wake)

    def _obey(self, order: dict[str, Any]) -> None:
        if order["op"] == "start":
            self._start(order)
        elif (keeper := self._keepers.get(order["id"])) is not None:
            keeper.send({"grace": order["grace"]})

    def _start(self, order: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._become_keeper(Channel(theirs), ours, order)
        theirs.close()
        self._keepers[order["id"]] = Channel(ours)
        self._pids[pid] = order["id"]

    def _become_keeper(self, channel: Channel, ours: socket.socket, order: dict[str, Any]) -> NoReturn:
        """Become a keeper in the forked child: close the inherited sockets, then run."""
        status = 1
        try:
            self._wake.close()
            self._runner.sock.close()
            ours.close()
            for other in self._keepers.values():
                other.sock.close()
            Keeper(channel, order).run()
            status = 0
        except Exception as error:  # noqa: BLE001  a fork must never return into its parent's code
            channel.send({"event": "exited", "id": order["id"], "code": START_ERROR, "error": str(error)})
        finally:
            os._exit(status)

    def _forward(self, identity: str) -> None:
        reports = self._keepers[identity].receive()
        for report in reports or ():
            self._runner.send(report)
            if report["event"] == "exited":
                self._forget(identity)
                return

    def _forget(self, identity: str) -> None:
        self._keepers.pop(identity).sock.close()

    def _lost(self, pid: int) -> None:
        """Clean up after a child that has ended, and report the pod's end if its keeper did not."""
        identity = self._pids.pop(pid, None)
        if identity is None:
            return
        if identity in self._keepers:
            self._forward(identity)  # the keeper's last report may still be in the socket
        codes = kill_all(self._wake, without=self._pids)
        if identity in self._keepers:
            self._forget(identity)
            error = "the process that supervises this pod was killed, and the pod with it"
            self._runner.send({"event": "exited", "id": identity, "code": KILLED_KEEPER, "error": error})
        for other in codes:
            self._lost(other)


def main() -> int:
    """Supervise a run for the runner at the other end of the socket on standard input."""
    become_subreaper("pod-supervisor")
    runner = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # descriptor 0 stays in use, so that no pipe ever gets this number
    Supervisor(Channel(runner)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
