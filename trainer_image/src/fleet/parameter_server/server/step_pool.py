"""The threads of a server that sum and step what is large, as many as it has cores.

A thread that receives from a trainer finds out what the gradient makes possible, and hands it over: the next
gradient is received meanwhile. So one trainer keeps several cores busy, and many keep no more than there are.
What a small gradient makes possible the thread that receives does itself: to wake another one would take
longer. So it does with gradients in shared memory, of which nothing is received, and in the modes without a
barrier, where the buffer is free for the next gradient only once this one is applied.
"""

import queue
import threading
from collections.abc import Callable

__all__ = ["LEAST_BYTES", "StepPool"]

LEAST_BYTES = 1 << 16
"""How many bytes must have been received for a gradient to be worth a thread's waking."""


class StepPool:
    """Does work in the order in which it is handed over, several at once.

    Parameters
    ----------
    num_threads : int
        With fewer than two there are none: one core gains nothing by them.
    """

    def __init__(self, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"fleet-step-{number}", daemon=True)
            for number in range(num_threads if num_threads > 1 else 0)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def takes(self, received_bytes: int) -> bool:
        """Whether what a gradient makes possible that was so long is to be handed over."""
        return bool(self._threads) and received_bytes >= LEAST_BYTES

    def submit(self, work: Callable[[], None]) -> None:
        """Hand work over; it may raise nothing."""
        self._queue.put(work)

    def close(self) -> None:
        """Let the threads end, once they have done what was handed over; whoever closes does not wait."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
