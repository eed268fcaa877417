"""An operator that records its own memory and the stalls of its event loop.

``python -m benchmarks.sampled_operator FILE`` runs the operator with an additional task, which appends JSON
objects to the file, ``{"at", "halt", "cpu", "rss"}``: the time, the length of a stall of the event loop in
seconds, the CPU seconds of the loop's thread during the stall, and the resident bytes. On a busy machine, a
stall may be only a wait for a processor; the CPU seconds are the operator's own.
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
"""The minimum length of a stall that is recorded."""

RSS_SECONDS = 0.05
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SampledOperator(startup.Operator):
    """The operator together with a task that samples it."""

    async def run(self) -> int:
        """Run the operator and sample it until it ends."""
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
