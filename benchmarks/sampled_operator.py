"""An operator that records its own memory and the stalls of its event loop.

``python -m benchmarks.sampled_operator FILE`` is the operator, with one task more. It adds JSON objects to
the file, ``{"at", "halt", "cpu", "rss"}``: the time, for how many seconds the loop then did nothing for
others, how many of them its own thread computed, and the resident bytes. On a busy machine a halt may only
be a wait for a processor; what the thread computed is the operator's own.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from fleet_operator import startup

__all__ = ["main"]

TICK_SECONDS = 0.005
TOLD_SECONDS = 0.02
"""Halts from here on are noted."""

RSS_SECONDS = 0.05
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SampledOperator(startup.Operator):
    """The operator together with a task that samples it."""

    async def run(self) -> int:
        """Run the operator until it ends, sampling it meanwhile."""
        sampling = asyncio.create_task(_sample(Path(sys.argv[1])))
        try:
            return await super().run()
        finally:
            sampling.cancel()


async def _sample(path: Path) -> None:
    with path.open("a", buffering=1) as told:
        before, cpu, looked = time.monotonic(), time.thread_time(), float("-inf")
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now, taken = time.monotonic(), time.thread_time()
            halt = now - before - TICK_SECONDS
            if halt >= TOLD_SECONDS or now - looked >= RSS_SECONDS:
                looked = now
                rss = _resident_bytes()
                print(
                    json.dumps({"at": time.time(), "halt": halt, "cpu": taken - cpu, "rss": rss}), file=told
                )
            before, cpu = time.monotonic(), time.thread_time()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main() -> int:
    """Run the sampled operator as a program."""
    startup.Operator = SampledOperator  # type: ignore[misc]
    return startup.run_operator()


if __name__ == "__main__":
    sys.exit(main())
