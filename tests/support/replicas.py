"""A parameter-server job of real processes that use loopback; all of them are killed after the test."""

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.forked_python import ForkedPython
from tests.support.processes import free_ports, wait_for

HOST = "127.0.0.1"


@dataclass
class Replica:
    """A process of a job, and its output."""

    name: str
    process: ForkedPython
    log: Path

    @property
    def output(self) -> str:
        """The combined stdout and stderr so far."""
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the end of the process and return its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds:g} s:\n{self.output}") from None

    def expect(self, status: int, *words: str, seconds: float = 60.0) -> None:
        """Wait for the process to end; check its exit status and that its output contains the given texts."""
        found = self.wait(seconds)
        assert found == status, f"{self.name} ended with {found}, expected {status}:\n{self.output}"
        for word in words:
            assert word in self.output, f"{self.name} does not say {word!r}:\n{self.output}"

    def wait_for_output(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """Wait for a pattern in the output and return its first match."""

        def look() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.output)
            assert match or not ended, f"{self.name} ended without {pattern!r}:\n{self.output}"
            return match

        match = wait_for(look, f"{pattern!r} from {self.name}", seconds=seconds)
        assert match is not None
        return match

    def kill(self) -> None:
        """Kill the process, but not its children, with SIGKILL."""
        self.process.kill()
        self.process.wait()


@dataclass
class Job:
    """A parameter-server job of real processes.

    Parameters
    ----------
    directory : Path
        The folder of the logs.
    servers, trainers : int
        The size of the job, whether its replicas are started or not.
    environ : mapping
        Further environment variables of all replicas.
    rounds : int
        The number of successive jobs for which the servers need ports; each job has the next ports.
    """

    directory: Path
    servers: int
    trainers: int
    environ: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 1
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        ports = free_ports(self.servers * self.rounds)
        self.endpoints = [f"{HOST}:{port}" for port in ports[: self.servers]]

    def server(self, index: int, script: Path, *arguments: str, **environ: str) -> Replica:
        """Start one parameter server."""
        role = {"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": self.endpoints[index].rpartition(":")[2]}
        return self._start(f"pserver-{index}", script, arguments, role | environ)

    def trainer(self, index: int, script: Path, *arguments: str, **environ: str) -> Replica:
        """Start one trainer."""
        role = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(index)}
        return self._start(f"trainer-{index}", script, arguments, role | environ)

    def start(self, script: Path, *arguments: str) -> tuple[list[Replica], list[Replica]]:
        """Start all replicas; return the servers and the trainers."""
        servers = [self.server(index, script, *arguments) for index in range(self.servers)]
        trainers = [self.trainer(index, script, *arguments) for index in range(self.trainers)]
        return servers, trainers

    def wait_until_serving(self, index: int, seconds: float = 120.0) -> None:
        """Wait until a parameter server accepts connections."""
        host, _, port = self.endpoints[index].rpartition(":")

        def look() -> bool:
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), timeout=1.0).close()
                return True
            return False

        wait_for(look, f"parameter server {index} at {self.endpoints[index]}", seconds=seconds)

    def close(self) -> None:
        """Kill all processes that are still running, including children."""
        for replica in self.replicas:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(replica.process.pid, signal.SIGKILL)
            replica.process.kill()
            replica.process.wait()

    def _start(
        self, name: str, script: Path, arguments: Sequence[str], environ: Mapping[str, str]
    ) -> Replica:
        log = self.directory / f"{name}.{len(self.replicas)}.log"
        everything: dict[str, Any] = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLEET_"))},
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(self.endpoints),
            "PADDLE_TRAINERS_NUM": str(self.trainers),
            "POD_IP": HOST,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "FLEET_JOB_NAME": "test",
            "FLEET_JOB_UID": self.directory.name,
            "FLEET_TERMINATION_LOG": os.devnull,
            **self.environ,
            **environ,
        }
        with log.open("wb") as output:
            process = ForkedPython(script, *arguments, env=everything, output=output, errors=output)
        replica = Replica(name, process, log)
        self.replicas.append(replica)
        return replica


@contextmanager
def job(directory: Path, servers: int, trainers: int, rounds: int = 1, **environ: str) -> Iterator[Job]:
    """Yield a job whose processes are killed after the block."""
    made = Job(directory, servers, trainers, environ, rounds)
    try:
        yield made
    finally:
        made.close()
