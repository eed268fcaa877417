"""Python programs that start quickly because they are forked from a process that has imported torch.

Each program is a separate process, which tests may kill. It ends like a program that was started from the
command line (after its last line, by an exception or by a signal), except that Python's final clean-up is
skipped: it would copy the memory that is shared since the fork, which takes longer than most programs run.
Only third-party packages are preloaded, unless a subclass says otherwise; this project's packages are
imported in each program. Use these programs to test what a program does, not how it starts.

As a program, this module is the process from which the others are forked, the forker. All processes of a test
session share it, and it ends with the last of them. It receives one packet per program: the request as JSON,
with the descriptors of the output and of a pipe. On the pipe the forker returns the id of the process and
later its exit status.

Programs that other programs start, such as the launchers and `fleetjob run`, are forked as well if they run
in the environment of `relay`. There, ``python`` imports nothing, requests a forked program, forwards signals
to it and ends with the same status. Killing this ``python`` also kills the program, a moment later;
`program_of` returns the id of the program itself.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import hashlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PRELOADED", "ForkedPython", "program_of", "relay"]

PRELOADED = (
    "numpy.typing",
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.utils.data",
    "safetensors.torch",
    "google.protobuf.text_format",
    "grpc",
    "grpc_health.v1.health_pb2",
)
LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads do not survive a fork
WITHOUT_FORK_SUPPORT = {"GRPC_ENABLE_FORK_SUPPORT": "0"}  # as fleet sets it before it imports gRPC
LARGEST_REQUEST = 1 << 17

RELAY = """#!{python} -IS
import contextlib, json, os, select, signal, socket, sys

def pass_on(number, _):
    with contextlib.suppress(ProcessLookupError):  # it has ended since
        os.kill(program, number)

def relayed():
    global program
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as forker:
        forker.connect("\\0" + os.environ["FORKED_PYTHON"])
        answers, write = os.pipe()
        request = {{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "relay": __file__}}
        socket.send_fds(forker, [json.dumps(request).encode()], [1, 2, write])
    os.close(write)
    program = int.from_bytes(os.read(answers, 4), "big", signed=True)
    if program == 0:
        sys.exit("the process that programs are forked from has ended")
    with open(f"{{os.path.dirname(__file__)}}/{{os.getpid()}}", "w") as file:
        file.write(str(program))
    # A handler that is called just before os.read would run only after it; this pipe ends the wait.
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    while answers not in select.select([answers, wake], [], [])[0]:
        os.read(wake, 100)
    return int.from_bytes(os.read(answers, 4), "big", signed=True)

status = relayed()
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class ForkedPython:
    """A program that runs in a forked process, with the interface of `subprocess.Popen`.

    Parameters
    ----------
    script : Path or str
        The script to run, or ``-m`` or ``-c``.
    *arguments : str
        What follows on the command line.
    env : mapping
        The environment of the program, except that OpenMP always uses one thread.
    output, errors : files
        The files for standard output and standard error; both may be the same.
    cwd : Path, optional
        The working directory.

    Attributes
    ----------
    preloaded : tuple of str
        The modules that are imported before the fork.
    python : str
        The interpreter.
    """

    preloaded: ClassVar[tuple[str, ...]] = (*PRELOADED, "sklearn.datasets")  # which many examples train on
    python: ClassVar[str] = sys.executable

    def __init__(
        self,
        script: Path | str,
        *arguments: str,
        env: Mapping[str, str],
        output: IO[Any],
        errors: IO[Any],
        cwd: Path | None = None,
    ) -> None:
        answers, write = os.pipe()
        request = {"argv": [str(script), *arguments], "env": dict(env), "cwd": str(cwd or Path.cwd())}
        try:
            descriptors = [output.fileno(), errors.fileno(), write]
            forker = _forker(self.preloaded, self.python)
            socket.send_fds(forker, [json.dumps(request).encode()], descriptors)
        finally:
            os.close(write)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self.pid = self._answer()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), or None while the program is running."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the program has ended; return its exit status, or raise subprocess.TimeoutExpired."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to the program unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program immediately."""
        self.send_signal(signal.SIGKILL)

    def _has_answered(self, timeout: float | None) -> bool:
        answers = select.poll()  # select.select refuses descriptors above 1023
        answers.register(self._answers, select.POLLIN)
        return bool(answers.poll(None if timeout is None else timeout * 1000))

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._has_answered(timeout):
            self.returncode = self._answer()
            self._answers.close()
        return self.returncode

    def _answer(self) -> int:
        answer = self._answers.read(4)
        if len(answer) < 4:  # the pipe was closed
            raise AssertionError("the process that programs are forked from has ended; it has said why")
        return int.from_bytes(answer, "big", signed=True)


def relay(program: type[ForkedPython] = ForkedPython) -> dict[str, str]:
    """Return an environment in which ``python`` and launchers are forked from `program`'s preloaded process.

    Linux only, because the forker's socket has an abstract name.
    """
    _forker(program.preloaded, program.python)
    path = f"{_relay_folder()}:{Path(program.python).parent}:{os.environ['PATH']}"
    return {"PATH": path, "FORKED_PYTHON": _address(program.preloaded, program.python)}


def program_of(pid: int) -> int:
    """Return the id of the process forked for the ``python`` with id `pid`, or `pid` itself; see `relay`."""
    try:
        return int((_relay_folder() / str(pid)).read_text())
    except FileNotFoundError:
        return pid


@functools.cache
def _relay_folder() -> Path:
    """Return the folder of `relay`'s programs, in which each of them records the process forked for it."""
    folder = Path(tempfile.mkdtemp(prefix="relay-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "python").write_text(RELAY.format(python=sys.executable))
    for name, module in LAUNCHERS.items():
        (folder / name).write_text(f'#!/bin/sh\nexec python -m {module} "$@"\n')
    for path in folder.iterdir():
        path.chmod(0o755)
    return folder


def _address(preloaded: Sequence[str], python: str) -> str:
    """Return the name of the socket of this session's forker."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    kind = hashlib.sha256(repr((preloaded, python)).encode()).hexdigest()[:12]
    return f"forked-python-{session}-{kind}"


@functools.cache
def _forker(preloaded: Sequence[str], python: str) -> socket.socket:
    """Return a connection to the session's forker for these modules; start the forker if there is none."""
    address = f"\0{_address(preloaded, python)}"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST_REQUEST)
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                listener.listen()
                subprocess.Popen(
                    [python, "-m", __name__, str(listener.fileno()), *preloaded],
                    env=os.environ | ONE_THREAD | WITHOUT_FORK_SUPPORT,
                    cwd=Path(__file__).parents[2],
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            # The forker with this name may not listen yet, or may be ending.
            with contextlib.suppress(ConnectionRefusedError):
                connection.connect(address)
                return connection


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each request and return it in the new process; return None here once no connection is left."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    connections: dict[int, socket.socket] = {}
    while True:
        for ready, _ in waiting.poll():
            if ready == listener.fileno():
                connection, _ = listener.accept()
                connections[connection.fileno()] = connection
                waiting.register(connection, select.POLLIN)
                continue
            packet, descriptors, _, _ = socket.recv_fds(connections[ready], LARGEST_REQUEST, 3)
            if not packet:
                waiting.unregister(ready)
                connections.pop(ready).close()
                continue
            if os.fork() == 0:  # the parent of the program, which waits for it
                for each in (listener, *connections.values()):
                    each.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _watched(json.loads(packet), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        if not connections:
            return None


def _watched(request: dict[str, Any], output: int, errors: int, answers: int) -> dict[str, Any]:
    """Fork the program's process and return only there; this process waits for it to end, and then exits."""
    program = os.fork()
    if program == 0:
        os.close(answers)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.closerange(3, max(output, errors, answers) + 1)
        return request
    os.write(answers, program.to_bytes(4, "big", signed=True))
    for descriptor in (output, errors):
        os.close(descriptor)
    if "relay" in request:
        _kill_with_its_relay(program, answers)
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(BrokenPipeError):  # the relay was killed
        os.write(answers, os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
    os._exit(0)


def _kill_with_its_relay(program: int, answers: int) -> None:
    """Wait until the program has ended; kill it if its relay ends first."""
    waiting = select.poll()
    ended = os.pidfd_open(program)
    waiting.register(ended, select.POLLIN)
    waiting.register(answers, 0)  # reports an error once the other end is closed
    if ended not in (descriptor for descriptor, _ in waiting.poll()):
        os.kill(program, signal.SIGKILL)


def _become(request: dict[str, Any]) -> NoReturn:
    """Run the requested program in this process, and exit."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # a new process has its own random numbers
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"] | ONE_THREAD)
    os.chdir(request["cwd"])
    sys.executable = request.get("relay", sys.executable)
    sys.argv[:] = request["argv"]
    # With write_through, which PYTHONUNBUFFERED sets, print() writes a line and its end in two calls, and
    # a line of another thread's log may come between them.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    time.tzset()
    status = _run(*request["argv"])
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(what: str, *more: str) -> int:
    """Run a script and return its exit status; exceptions are reported as Python reports them."""
    if what == "-u":
        del sys.argv[0]
        return _run(*more)
    try:
        if what == "-c":
            source, *_ = more
            sys.path[0] = ""
            sys.argv[:2] = ["-c"]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(source, "<string>", "exec"), vars(main))  # noqa: S102
        elif what == "-m":
            module, *_ = more
            sys.path[0] = str(Path.cwd())
            del sys.argv[0]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(what).parent.resolve())
            runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except Exception:  # noqa: BLE001 a script may raise any exception
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _main() -> None:
    for name in sys.argv[2:]:
        __import__(name)
    gc.freeze()  # otherwise each program's garbage collection would copy this memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap the parents of programs automatically
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        _become(request)
    os._exit(0)


if __name__ == "__main__":
    _main()
