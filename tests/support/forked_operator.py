"""Operators that start quickly because they are forked from a process with all imports loaded.

Each is a separate process that tests may kill. It can run with a wrong clock, with a shorter time limit for
silent watches, or with timers that take longer while it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from fleet_operator.plan.decide import quota
from tests.support.operator_process import OperatorProcess

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["fleet_operator.startup", __name__])


class ForkedOperator(OperatorProcess):
    """A forked operator, whose settings can be changed between two runs."""

    clock_offset = timedelta()
    """The difference between the operator's time of day and this machine's."""

    silence_seconds = 75.0
    """The time limit for a silent watch."""

    quota_patience = quota.PATIENCE
    """The time for which a job keeps its pods while a quota rejects further pods."""

    slowness_of_stopping = 1.0
    """The factor by which timers take longer once the operator has been told to stop."""

    def _spawn(self) -> _Forked:
        arguments = (
            self._environment,
            self.log,
            self.clock_offset,
            self.silence_seconds,
            self.quota_patience,
            self.slowness_of_stopping,
        )
        process = _forks.Process(target=_run, args=arguments, daemon=True)
        process.start()
        return _Forked(process)

    def start_at_once(self) -> None:
        """Start the operator and return before it is ready."""
        self._process = self._spawn()

    def kill_at_once(self) -> None:
        """Kill the operator and return before it has ended."""
        self._running.kill()


class _Forked:
    """A forked process with the interface of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("operator", timeout or 0)
        return status

    def send_signal(self, sig: int) -> None:
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
                os.kill(self._process.pid, sig)

    def kill(self) -> None:
        self._process.kill()


def _run(
    environment: dict[str, str],
    log: Path,
    offset: timedelta,
    silence_seconds: float,
    patience: timedelta,
    slowness: float,
) -> None:
    from fleet_operator import startup
    from fleet_operator.engine import SystemClock
    from fleet_operator.kubernetes import reflector as watch

    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if offset:
        SystemClock.now = lambda _: datetime.now(UTC) + offset  # type: ignore[method-assign, assignment]
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.DEBUG)  # logs the tasks that did not end

    def catch_signals(stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()

        def caught() -> None:
            told = time.monotonic()
            loop.time = lambda: told + (time.monotonic() - told) / slowness  # type: ignore[method-assign]
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, caught)

    if slowness > 1:
        startup._catch_signals = catch_signals
    watch.SILENCE_SECONDS = silence_seconds
    quota.PATIENCE = patience
    raise SystemExit(startup.run_operator(environment))
