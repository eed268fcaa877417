"""The processes of a measured system, which are stopped except during measurements."""

import ctypes
import functools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, TextIO, TypeVar

from benchmarks import certificates
from benchmarks.hosts import LOOPBACK, Hosts
from benchmarks.pipes import hear_all
from benchmarks.systems import ENCRYPTED
from benchmarks.workload import MAX_BATCH, Config
from fleet.process.resources import COPY_PAST_CACHES

__all__ = ["END_SECONDS", "Measured", "Running", "Shape", "interleave", "say", "spread", "stream"]

END_SECONDS = 30.0
HEARTBEAT_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """The size of a system: its numbers of processes and the widths of its layers."""

    num_servers: int
    num_trainers: int
    widths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measured:
    """The measurements of one system in one round."""

    seconds: float
    """The time from the start signal until every trainer has completed its steps."""
    step_seconds: tuple[float, ...]
    """The time of each of trainer 0's steps."""


class Running:
    """The processes of a system, which run steps only when :meth:`measure` requests them.

    Parameters
    ----------
    name : str
        One of `benchmarks.systems.SYSTEMS`, optionally followed by a hyphen and a distinguishing suffix.
    shape : Shape
    hosts : Hosts
        The hosts of the processes.
    python : str
        The interpreter, which may have another version of the package installed.
    heartbeat_seconds : float
        The interval of heartbeats. The default is longer than a system is ever stopped, so that no process
        considers a stopped peer silent.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        hosts: Hosts = LOOPBACK,
        python: str = sys.executable,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self.name = name
        self._python = python
        self._heartbeat_seconds = heartbeat_seconds
        self._shape = shape
        self._hosts = hosts
        self._servers: list[subprocess.Popen[str]] = []
        self._trainers: list[subprocess.Popen[str]] = []

    @property
    def pids(self) -> dict[str, int]:
        """The process ids by process name, such as "server0", servers first."""
        return {
            f"{role}{index}": process.pid
            for role, processes in (("server", self._servers), ("trainer", self._trainers))
            for index, process in enumerate(processes)
        }

    def start(self) -> None:
        """Start every process; use :meth:`await_ready` to wait for them."""
        system, shape = self.name.partition("-")[0], self._shape
        trainers = range(shape.num_trainers)
        servers = range(shape.num_trainers, shape.num_trainers + shape.num_servers)
        endpoints = self._hosts.endpoints(servers or trainers[:1])
        for role, hosts, processes in (
            ("server", servers, self._servers),
            ("trainer", trainers, self._trainers),
        ):
            for index, host in enumerate(hosts):
                config = Config(
                    system, role, index, shape.num_servers, shape.num_trainers, endpoints, shape.widths
                )
                processes.append(_start(config, self._hosts, host, self._python, self._heartbeat_seconds))

    def await_ready(self) -> None:
        """Wait until every trainer is ready for a measurement."""
        self._await("ready")

    def measure(self, steps: int, batch: int = MAX_BATCH) -> Measured:
        """Run steps on every trainer, then pause the processes; return the time that the steps took."""
        with self.awake():
            return self.make(steps, batch)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes run within the block, and stop them again afterwards."""
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def make(self, steps: int, batch: int) -> Measured:
        """Run steps on every trainer while the processes are awake; return the time that the steps took."""
        began = time.perf_counter()
        for trainer in self._trainers:
            stream(trainer.stdin).write(f"{steps} {batch}\n")
            stream(trainer.stdin).flush()
        step_seconds = self._await("done")
        return Measured(time.perf_counter() - began, tuple(step_seconds))

    def release(self) -> None:
        """Close the standard input of every process, which ends the trainers and then the servers."""
        self._signal(signal.SIGCONT)
        for process in self._trainers + self._servers:
            stream(process.stdin).close()

    def close(self, deadline: float) -> None:
        """Wait until every process has ended; kill those that are still running at the deadline."""
        for process in self._trainers + self._servers:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._trainers + self._servers:
            if process.poll() is None:
                process.send_signal(number)

    def _await(self, word: str) -> list[float]:
        """Wait for a line from every trainer; return the numbers in trainer 0's line."""
        trainers = {f"{self.name}: trainer {index}": each for index, each in enumerate(self._trainers)}
        servers = {f"{self.name}: server {index}": each for index, each in enumerate(self._servers)}
        pipes = {name: stream(process.stdout) for name, process in (trainers | servers).items()}
        numbers = []
        for name, line in hear_all(pipes, trainers.keys()).items():
            answer, _, told = line.partition(" ")
            if answer != word:
                found = f"answered {answer!r}" if answer else "has ended"
                raise SystemExit(
                    f"{name} {found}, expected {word!r}; what it printed above says why, or the kernel's log "
                    "if it was killed for want of memory"
                )
            numbers.append(told)
        return [float(number) for number in numbers[0].split()]


_KEY = secrets.token_hex(32)
"""Without a key, servers listen only on loopback, which other simulated hosts cannot reach."""


_certificates = functools.cache(certificates.environment)


def stream(pipe: Any) -> TextIO:
    """Return a pipe of a process that was started with pipes."""
    assert pipe is not None
    return pipe  # type: ignore[no-any-return]


def _start(
    config: Config, hosts: Hosts, host: int, python: str, heartbeat_seconds: float
) -> subprocess.Popen[str]:
    environ = (
        COPY_PAST_CACHES
        | os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": hosts.interface,
            "TP_SOCKET_IFNAME": hosts.interface,
            "FLEET_HEARTBEAT_SECONDS": f"{heartbeat_seconds:g}",
            "FLEET_JOB_KEY": _KEY,
        }
        | (_certificates() if config.system in ENCRYPTED else {})
    )
    program = [python, "-W", "ignore", "-m", "benchmarks.worker", json.dumps(asdict(config))]
    return subprocess.Popen(
        hosts.command(host, program),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """Make this process end with the benchmark, even while this process is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def interleave(
    running: Mapping[str, Running],
    batches: Sequence[int],
    steps: int,
    warm_up_steps: int,
    measure: Callable[[Running, int, int], T],
) -> Generator[dict[str, T], None, None]:
    """Start the systems, measure each once per round in varying order, and end all of them.

    Parameters
    ----------
    running : mapping of name to Running
    batches : sequence of int
        The size of the batches, by round.
    steps, warm_up_steps : int
        The number of steps in a round, and the number of steps before the first round.
    measure : callable
        Measures a system for a number of steps and a batch size; by default :meth:`Running.measure`.

    Yields
    ------
    dict
        One round: the result of `measure` for each system.
    """
    try:
        for system in running.values():
            system.start()
            system.await_ready()
            system.measure(warm_up_steps)
            say(f"{system.name} is ready")
        for number, batch in enumerate(batches):
            order = random.Random(number).sample(sorted(running), len(running))  # noqa: S311 (not used for secrets)
            measured = {name: measure(running[name], steps, batch) for name in order}
            yield {name: measured[name] for name in running}
    finally:
        for system in running.values():
            system.release()
        deadline = time.monotonic() + END_SECONDS
        for system in running.values():
            system.close(deadline)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 10th percentile and the 90th percentile."""
    deciles = quantiles(values, n=10, method="inclusive") if len(values) > 1 else list(values) * 9
    return {"median": median(values), "p10": deciles[0], "p90": deciles[8]}


def say(text: str) -> None:
    """Print a progress message of the benchmark."""
    print(text, file=sys.stderr, flush=True)
