"""Benchmarks the memory overhead of dense training on servers and trainers.

``python -m benchmarks.dense_memory --json`` trains the model of 25 million parameters with two trainers, or
with the number set by ``--trainers``. It prints the peak memory of each process during steps. For a server,
the memory of a process that only has the same imports is subtracted; for a trainer, that of a trainer that
has the same imports and only computes. It measures synchronous training over TCP and through shared memory,
where a page counts in equal parts for the processes that map it, and asynchronous training over TCP.
"""

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.running import Running, Shape, say
from benchmarks.workload import NUM_PARAMETERS, WIDTHS

__all__ = ["main"]

PARAMETER_BYTES = 4 * NUM_PARAMETERS
STEPS = 10
END_SECONDS = 30.0
TRANSPORTS = {"fleet": "TCP", "shared": "shared memory", "async": "TCP, async"}


def peaks(running: Running) -> list[int]:
    """Run a system; return the peak memory of each process in bytes during the steps, servers first."""
    try:
        running.start()
        running.await_ready()
        running.measure(STEPS)
        for pid in running.pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        running.measure(STEPS)
        return [_peak(pid) for pid in running.pids.values()]
    finally:
        running.release()
        running.close(time.monotonic() + END_SECONDS)


def _peak(pid: int) -> int:
    counted_by_others = _bytes_of(pid, "status", "RssShmem") - _bytes_of(pid, "smaps_rollup", "Pss_Shmem")
    return _bytes_of(pid, "status", "VmHWM") - counted_by_others


def _bytes_of(pid: int, file: str, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text())
    if found is None:
        raise SystemExit(f"/proc/{pid}/{file} has no {field}; this benchmark needs Linux")
    return 1024 * int(found[1])


def report(
    system: str, num_servers: int, ours: Sequence[int], computing: int, imports: int
) -> dict[str, Any]:
    """Summarize memory in bytes, and as a multiple of the size of the data that a process must hold.

    Parameters
    ----------
    system : str
        One of `TRANSPORTS`.
    num_servers : int
    ours : sequence of int
        The peak memory of fleet's servers and trainers.
    computing : int
        The peak memory of a trainer that has the same imports and only computes.
    imports : int
        The peak memory of a process that only has the same imports.
    """
    servers, trainers = ours[:num_servers], ours[num_servers:]
    held = PARAMETER_BYTES / num_servers
    server, trainer = max(servers) - imports, max(trainers) - computing
    return {
        "transport": TRANSPORTS[system],
        "servers": num_servers,
        "server_bytes": server,
        "server_in_its_parameters": server / held,
        "trainer_bytes": trainer,
        "trainer_in_parameters": trainer / PARAMETER_BYTES,
    }


def run(trainers: int, systems: Sequence[str]) -> dict[str, Any]:
    """Measure each of the given transports with one server and with two."""
    (imports,) = peaks(Running("imports", Shape(0, 1, WIDTHS)))
    computing = max(peaks(Running("alone", Shape(0, trainers, WIDTHS))))
    rows = []
    for system, num_servers in product(systems, (1, 2)):
        ours = peaks(Running(system, Shape(num_servers, trainers, WIDTHS)))
        rows.append(report(system, num_servers, ours, computing, imports))
        say(f"{TRANSPORTS[system]} with {num_servers} of 2 servers is measured")
    return {
        "benchmark": "dense_memory",
        "parameter_bytes": PARAMETER_BYTES,
        "trainers": trainers,
        "rows": rows,
    }


def show(summary: dict[str, Any]) -> None:
    """Print the summary as a table."""
    print(f"{'peak beyond what it would have anyway':<56}{'MB':>8}{'x its parameters':>20}")
    for row in summary["rows"]:
        name = (
            f"{row['transport']}: each of {row['servers']} servers, {summary['trainers']} gradients included"
        )
        print(f"{name:<56}{row['server_bytes'] / 1e6:>8.0f}{row['server_in_its_parameters']:>20.2f}")
        name = f"{row['transport']}: each trainer, {row['servers']} servers"
        print(f"{name:<56}{row['trainer_bytes'] / 1e6:>8.0f}{row['trainer_in_parameters']:>20.2f}")


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dense_memory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--systems", default=",".join(TRANSPORTS), help=f"of {', '.join(TRANSPORTS)}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to end all processes
    summary = run(options.trainers, options.systems.split(","))
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)


if __name__ == "__main__":
    main()
