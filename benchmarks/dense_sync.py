"""Steps per second of dense synchronous training with two trainers, beside the alternatives.

``python -m benchmarks.dense_sync --json`` trains one model of 25 million parameters with every system, in
interleaved rounds: the processes of all systems live from beginning to end, and those that are not being
measured are stopped (SIGSTOP), as some poll without a pause even when they have nothing to do. So every
system meets the same state of the machine, and ratios are taken within a round. Every process computes with
one thread.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any, TextIO

from benchmarks.workload import NUM_PARAMETERS, Config

__all__ = ["main"]

NUM_TRAINERS = 2
NUM_SERVERS = {
    "compute": 0,
    "ddp": 0,
    "rpc-1": 1,
    "rpc-2": 2,
    "grpc-1": 1,
    "grpc-2": 2,
    "fleet-1": 1,
    "fleet-2": 2,
}
ABOUT = {
    "compute": "compute only, no communication",
    "ddp": "DistributedDataParallel on gloo",
    "rpc-1": "torch.distributed.rpc, 1 server",
    "rpc-2": "torch.distributed.rpc, 2 servers",
    "grpc-1": "tuned grpcio streams, 1 server",
    "grpc-2": "tuned grpcio streams, 2 servers",
    "fleet-1": "fleet.parameter_server, 1 server",
    "fleet-2": "fleet.parameter_server, 2 servers",
}
RATIOS = [
    ("fleet-1", "rpc-1"),
    ("fleet-2", "rpc-2"),
    ("fleet-1", "grpc-1"),
    ("fleet-2", "grpc-2"),
    ("fleet-1", "ddp"),
    ("fleet-2", "ddp"),
    ("fleet-1", "compute"),
    ("fleet-2", "compute"),
]
WARM_UP_STEPS = 3
END_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
HEARTBEAT_SECONDS = 60
"""Longer than a system is ever stopped, so that nobody takes a stopped peer for a silent one."""


class Running:
    """The processes of one system; they wait until :meth:`measure` has them make some steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._servers: list[subprocess.Popen[str]] = []
        self._trainers: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start every process; :meth:`await_ready` waits for them."""
        system, num_servers = self.name.partition("-")[0], NUM_SERVERS[self.name]
        ports = _free_ports(max(1, num_servers))
        for role, count, processes in (
            ("server", num_servers, self._servers),
            ("trainer", NUM_TRAINERS, self._trainers),
        ):
            for index in range(count):
                config = Config(system, role, index, num_servers, NUM_TRAINERS, ports)
                processes.append(_start(config))

    def await_ready(self) -> None:
        """Wait until every trainer could begin."""
        self._await("ready")

    def measure(self, steps: int) -> float:
        """Have every trainer make steps, and stop; return how many they made per second."""
        self._signal(signal.SIGCONT)
        began = time.perf_counter()
        for trainer in self._trainers:
            stream(trainer.stdin).write(f"{steps}\n")
            stream(trainer.stdin).flush()
        self._await("done")
        seconds = time.perf_counter() - began
        self._signal(signal.SIGSTOP)
        return steps / seconds

    def release(self) -> None:
        """Close every process's input: the trainers end, and the servers with them."""
        self._signal(signal.SIGCONT)
        for process in self._trainers + self._servers:
            stream(process.stdin).close()

    def close(self, deadline: float) -> None:
        """Wait for every process to end; kill what has not ended by the deadline."""
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

    def _await(self, word: str) -> None:
        for index, trainer in enumerate(self._trainers):
            answer = stream(trainer.stdout).readline().strip()
            if answer != word:
                raise SystemExit(
                    f"{self.name}: trainer {index} answered {answer!r}, expected {word!r}; "
                    "what it printed above says why"
                )


def stream(pipe: Any) -> TextIO:
    """Return a pipe of a process that was started with pipes."""
    assert pipe is not None
    return pipe  # type: ignore[no-any-return]


def _start(config: Config) -> subprocess.Popen[str]:
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "FLEET_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS),
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.worker", json.dumps(asdict(config))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """End with the benchmark, whatever ends it: a stopped process would not even see its input end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> tuple[int, ...]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return tuple(each.getsockname()[1] for each in sockets)


def run(systems: Sequence[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure every system once per round, in an order that changes; return steps per second by system."""
    measured: dict[str, list[float]] = {name: [] for name in systems}
    running = [Running(name) for name in systems]
    try:
        for system in running:
            system.start()
            system.await_ready()
            system.measure(WARM_UP_STEPS)
            _say(f"{system.name} is ready")
        for number in range(rounds):
            for system in random.Random(number).sample(running, len(running)):  # noqa: S311 (an order)
                measured[system.name].append(system.measure(steps))
            shown = "  ".join(f"{name} {values[-1]:.1f}" for name, values in measured.items())
            _say(f"round {number + 1} of {rounds}: {shown} steps/s")
    finally:
        for system in running:
            system.release()
        deadline = time.monotonic() + END_SECONDS
        for system in running:
            system.close(deadline)
    return measured


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 10th and 90th percentile."""
    deciles = quantiles(values, n=10, method="inclusive") if len(values) > 1 else list(values) * 9
    return {"median": median(values), "p10": deciles[0], "p90": deciles[8]}


def report(measured: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Summarize: steps per second by system, and the ratios within each round."""
    ratios = {
        f"{ours}/{other}": spread([a / b for a, b in zip(measured[ours], measured[other], strict=True)])
        for ours, other in RATIOS
        if ours in measured and other in measured
    }
    return {
        "benchmark": "dense_sync",
        "parameters": NUM_PARAMETERS,
        "trainers": NUM_TRAINERS,
        "rounds": len(next(iter(measured.values()))),
        "steps_per_round": steps,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "steps_per_second": {name: spread(values) | {"rounds": values} for name, values in measured.items()},
        "ratios": ratios,
    }


def show(summary: dict[str, Any]) -> None:
    """Print the summary as two tables."""
    print(f"{'steps/s':<36}{'median':>8}{'p10':>8}{'p90':>8}")
    for name, row in summary["steps_per_second"].items():
        print(f"{ABOUT[name]:<36}{row['median']:>8.2f}{row['p10']:>8.2f}{row['p90']:>8.2f}")
    if summary["ratios"]:
        print(f"\n{'ratio within a round':<36}{'median':>8}{'p10':>8}{'p90':>8}")
    for name, row in summary["ratios"].items():
        print(f"{name:<36}{row['median']:>8.2f}{row['p10']:>8.2f}{row['p90']:>8.2f}")


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dense_sync", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps per system and round (default: 10)")
    parser.add_argument("--systems", default=",".join(NUM_SERVERS), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    systems = options.systems.split(",")
    unknown = [name for name in systems if name not in NUM_SERVERS]
    if unknown or len(set(systems)) != len(systems):
        parser.error(
            f"--systems is {options.systems!r}; expected each at most once, of {', '.join(NUM_SERVERS)}"
        )
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds is {options.rounds} and --steps {options.steps}; expected 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that every process is ended
    summary = report(run(systems, options.rounds, options.steps), options.steps)
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
