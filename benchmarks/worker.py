"""A process of a measured system, controlled by the benchmark through standard input.

The process reads one line per round, with the number of steps and the batch size. When the steps are
complete, it writes a line with "done" and the seconds of each step. It ends at the end of its input, so that
no process outlives the benchmark.
"""

import json
import os
import sys
import threading
import time
from itertools import pairwise

import torch

from benchmarks.systems import SYSTEMS
from benchmarks.workload import Config

__all__ = ["main"]


def main() -> None:
    """Run the process that the first argument, a Config as JSON, describes."""
    fields = json.loads(sys.argv[1])
    config = Config(**fields | {name: tuple(fields[name]) for name in ("endpoints", "widths")})
    torch.set_num_threads(1)
    system = SYSTEMS[config.system]
    if config.role == "server":
        assert system.serve is not None
        threading.Thread(target=_end_with_input, daemon=True).start()
        system.serve(config)
        return
    step, end = system.trainer(config)
    _answer("ready")
    for line in sys.stdin:
        steps, size = map(int, line.split())
        times = [time.perf_counter()]
        for _ in range(steps):
            step(size)
            times.append(time.perf_counter())
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        _answer(" ".join(["done", *(f"{after - before:.7f}" for before, after in pairwise(times))]))
    end()


def _answer(word: str) -> None:
    print(word, flush=True)


def _end_with_input() -> None:
    """Exit some time after standard input is closed, in case no trainer is left to end this server."""
    sys.stdin.read()
    threading.Event().wait(20)
    os._exit(1)


if __name__ == "__main__":
    main()
