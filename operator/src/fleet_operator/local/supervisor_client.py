"""The runner's side of the supervisor's socket: sends orders and receives reports."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleet_operator.errors import OperatorError
from fleet_operator.local import supervisor as supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

CLOSE_SECONDS = supervisor.GRACE_SECONDS + supervisor.KILL_SECONDS + 2.0  # its limits, and a margin


class SupervisorLostError(OperatorError):
    """The supervisor ended unexpectedly; its keepers then stop all processes."""


@dataclass(frozen=True, slots=True)
class Started:
    """A report that a pod's main process has started."""

    id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A report that a pod's main process and all of its descendants have ended."""

    id: str
    code: int  # 128 + the signal, if a signal ended the process
    error: str | None = None  # why the process could not be started


class SupervisorClient:
    """Starts and stops processes through the supervisor.

    Parameters
    ----------
    report : callable
        Called on the event loop with each `Started` and `Exited`.
    lost : callable
        Called once if the supervisor ends while the run still needs it.
    hold : sequence of int
        Descriptors that the supervisor keeps open as long as it lives, such as the locks of the run's claims.
    """

    def __init__(
        self,
        report: Callable[[Started | Exited], None],
        lost: Callable[[SupervisorLostError], None],
        hold: Sequence[int] = (),
    ) -> None:
        self._report = report
        self._lost = lost
        self._hold = tuple(hold)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pids: dict[str, int] = {}  # the main processes that have not been reported as ended
        self._closing = False
        self._supervisor_died = False

    async def start(self) -> None:
        """Start the supervisor, and start receiving its reports."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                supervisor.__file__,
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                cwd=os.sep,
                pass_fds=self._hold,
                start_new_session=True,  # Ctrl-C in a terminal must reach only the runner
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reader = asyncio.create_task(self._listen(reader), name="supervisor")

    def launch(
        self, identity: str, *, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path
    ) -> None:
        """Start a process whose output, including that of its descendants, is appended to `log`."""
        self._order(
            {
                "op": "start",
                "id": identity,
                "argv": list(argv),
                "env": dict(env),
                "cwd": str(cwd),
                "log": str(log),
            }
        )

    def stop(self, identity: str, grace_seconds: float) -> None:
        """Send SIGTERM to a process; after `grace_seconds`, kill it and its descendants."""
        self._order({"op": "stop", "id": identity, "grace": grace_seconds})

    async def close(self) -> None:
        """Stop all processes, and wait until they have ended."""
        self._closing = True
        # A closed socket is the order to stop everything, the same as after the death of this process.
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
            except TimeoutError:
                logger.warning(
                    "the supervisor (pid %d) has not ended in %g s", self._process.pid, CLOSE_SECONDS
                )
        if self._reader is not None:
            self._reader.cancel()
        if self._supervisor_died:
            await self._outlast_keepers()

    async def _outlast_keepers(self) -> None:
        """Wait until the keepers of a killed supervisor have stopped their processes."""
        deadline = asyncio.get_running_loop().time() + CLOSE_SECONDS
        while alive := [pid for pid in self._pids.values() if _is_alive(pid)]:
            if asyncio.get_running_loop().time() > deadline:
                logger.warning("the processes %s have not ended in %g s", alive, CLOSE_SECONDS)
                return
            await asyncio.sleep(0.05)

    def _order(self, order: dict[str, Any]) -> None:
        if self._writer is None:
            raise RuntimeError("the supervisor has not been started: call start() first")
        if not (self._closing or self._supervisor_died):
            self._writer.write(json.dumps(order).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                report = json.loads(line)
                if report["event"] == "started":
                    self._pids[report["id"]] = report["pid"]
                    self._report(Started(report["id"], report["pid"]))
                else:
                    self._pids.pop(report["id"], None)
                    self._report(Exited(report["id"], report["code"], report["error"]))
        except ConnectionError:
            pass
        if not self._closing:
            self._supervisor_died = True
            self._lost(
                SupervisorLostError("the supervisor process of this run was killed, and its replicas with it")
            )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # gone, or by now the pid of another user's process
        return False
    return True
