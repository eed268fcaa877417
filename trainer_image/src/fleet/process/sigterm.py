"""SIGTERM, noticed at once whatever the main thread waits for.

A container's main process is PID 1, for which the kernel ignores SIGTERM unless it is handled, and Python
runs signal handlers only between bytecodes of the main thread: one that waits in a lock or inside a C
function would not end before the kubelet's SIGKILL. So the interpreter's wake-up descriptor reports the
signal to a thread.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["SigtermWatcher"]

_log = logging.getLogger(__name__)


class SigtermWatcher:
    """Calls back when a SIGTERM comes, beside the handler that the script may have."""

    def __init__(self) -> None:
        self._wakeup: tuple[int, int] | None = None
        self._owns_wakeup = True
        self._previous_handler: Any = signal.SIG_DFL
        self._handled = threading.Event()

    def handle(self, act: Callable[[], None]) -> None:
        """Have `act` called at each SIGTERM, in a thread of its own."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "fleet.init was called outside the main thread, where Python allows no signal handlers: "
                "as PID 1 of a container this replica would ignore SIGTERM"
            )
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is signal.SIG_IGN:
            return
        self._previous_handler = previous
        self._wakeup = reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=self._watch, args=(reader, act), name="fleet-lifecycle", daemon=True).start()
        taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if taken != -1:  # an event loop waits for it; the handler below wakes our watcher instead
            signal.set_wakeup_fd(taken)
            self._owns_wakeup = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def wait_for_script(self, seconds: float) -> None:
        """Let the script's own handler, where it has one, come to its end, for so long at most."""
        if callable(self._previous_handler):
            self._handled.wait(seconds)

    def undo(self) -> None:
        """Give a forked child the handler of before."""
        if self._wakeup is None:
            return
        if self._owns_wakeup:
            signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)
        for descriptor in self._wakeup:
            os.close(descriptor)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Wake the watcher, should another library have taken the wake-up descriptor, and act as before."""
        if self._wakeup is not None:
            os.write(self._wakeup[1], bytes([number]))
        if callable(self._previous_handler):
            try:
                self._previous_handler(number, frame)
            finally:
                self._handled.set()

    def _watch(self, reader: int, act: Callable[[], None]) -> None:
        while received := os.read(reader, 64):
            if signal.SIGTERM in received:
                act()
