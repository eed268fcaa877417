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
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

__all__ = ["POD_GRACE_SECONDS", "SigtermWatcher", "seconds_to_save"]

_log = logging.getLogger(__name__)
POD_GRACE_SECONDS = 30
"""terminationGracePeriodSeconds where a template does not say."""
SAVING_SHARE = 0.75
"""The part that a script which handles SIGTERM has; what has started its process wants to outlive it."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun's workers have."""
TORCHRUN_SECONDS = 30
"""What torchrun gives its workers, whatever the pod has."""
_QUESTION = 0
"""What goes through the pipe behind the signals, to be told that all before it have been read."""
_ANSWER_SECONDS = 1.0


def seconds_to_save(environ: Mapping[str, str]) -> float:
    """Return how long a script that handles SIGTERM may go on after one: most of the grace it is given."""
    said = environ.get("FLEET_GRACE_SECONDS", "").strip()
    grace = int(said) if said.isascii() and said.isdigit() else POD_GRACE_SECONDS
    if TORCHRUN in environ:
        grace = min(grace, TORCHRUN_SECONDS)
    return grace * SAVING_SHARE


class SigtermWatcher:
    """Calls back when a SIGTERM comes, beside the handler that the script may have."""

    def __init__(self) -> None:
        self._wakeup: tuple[int, int] | None = None
        self._owns_wakeup = True
        self._previous_handler: Any = signal.SIG_DFL
        self._received = False
        self._asked = self._answered = 0

    def handle(self, act: Callable[[], None]) -> None:
        """Have `act` called at each SIGTERM, in a thread of its own."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "fleet.init was called outside the main thread, where Python allows no signal handlers: "
                "as PID 1 of a container this replica would ignore SIGTERM, and it may count as completed"
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

    def is_received(self) -> bool:
        """Whether a SIGTERM has come: also one of which our thread has not read yet."""
        if self._wakeup is not None and not self._received:
            self._asked = asked = self._asked + 1
            os.write(self._wakeup[1], bytes([_QUESTION]))
            deadline = time.monotonic() + _ANSWER_SECONDS
            while self._answered < asked and not self._received and time.monotonic() < deadline:
                time.sleep(0.001)  # and no lock: a signal's handler may ask while the main thread does
        return self._received

    def script_handles(self) -> bool:
        """Whether the script handles the SIGTERM that has come, by a handler of before `handle` or after it.

        In place of ours there was one when the signal came, as nobody would have told us of it otherwise;
        what it has put there since may be none.
        """
        return signal.getsignal(signal.SIGTERM) != self._on_sigterm or callable(self._previous_handler)

    def undo(self) -> None:
        """Give a forked child the handler of before."""
        if self._wakeup is None:
            return
        if self._owns_wakeup:
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)
        for descriptor in self._wakeup:
            os.close(descriptor)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Wake the watcher, should another library have taken the wake-up descriptor, and act as before."""
        if self._wakeup is not None:
            os.write(self._wakeup[1], bytes([number]))
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    def _watch(self, reader: int, act: Callable[[], None]) -> None:
        while received := os.read(reader, 64):
            if signal.SIGTERM in received:
                self._received = True
                act()
            self._answered += received.count(_QUESTION)
