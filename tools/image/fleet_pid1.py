"""Lets a Python program run as a container's first process and still end on SIGTERM.

The kernel ignores a signal to a container's first process unless the process has a handler for it. A Python
handler runs only between two bytecodes: never while torch is being loaded, or while a collective waits for
its peers. A pod's ``command`` replaces the image's entry point, and would bypass an init program there.
Instead, the interpreter calls `step_aside` when it starts (from ``fleet_pid1.pth``): the program continues in
a child, where signals have their usual effect, and the first process only forwards signals, reaps orphans and
exits with the child's status.
"""

from __future__ import annotations

import os
import signal

__all__ = ["step_aside", "supervise"]

FORWARDED = frozenset(
    {
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)


def step_aside() -> None:
    """Fork and continue in the child if this is a container's first process; otherwise do nothing.

    Nothing is done at a terminal either, where Ctrl-C reaches all foreground processes.
    """
    if os.getpid() == 1 and not os.isatty(0):
        supervise()


def supervise() -> None:
    """Fork; return in the child, while the parent waits and exits with the child's status.

    If a signal has ended the child, the exit status is 128 + the signal's number, as in a shell.
    """
    watched = FORWARDED | {signal.SIGCHLD}
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited)
        return
    while True:
        received = signal.sigwait(watched)
        if received != signal.SIGCHLD:
            os.kill(child, received)
            continue
        status = _reap(child)
        if status is not None:
            os._exit(status)


def _reap(child: int) -> int | None:
    """Reap all ended processes; return the child's exit status if the child is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
