"""How a replica begins and ends: signals, uncaught errors, the served progress, the termination message.

A SIGTERM (see `sigterm`) flushes the output, leaves the last words and ends the process. It does not unwind
the stack, in which somebody may wait for a peer. A trainer whose script handles SIGTERM has most of the pod's
grace to save what it wants to and to end; it has not completed then, whatever it calls and whatever its exit
status says: otherwise nobody would miss the rest of its training.

Uncaught errors end a replica with the exit status of their type and with one sentence, on stderr and as the
termination message. Before :func:`start` only the user's mistakes do, which are told from then on that this
process imports `fleet`. Forked children get the handlers back as they were before :func:`start`.
"""

import atexit
import contextlib
import ipaddress
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from fleet.errors import EXIT_FAILURE, ConfigurationError, FleetError
from fleet.process import progress, resources
from fleet.process.last_words import LastWords
from fleet.process.script_end import ScriptEnd
from fleet.process.sigterm import SigtermWatcher, seconds_to_save

if TYPE_CHECKING:
    from fleet.role_maker import Role

__all__ = ["end_completed", "failed", "finish", "joined", "refuses", "start"]

EXIT_TERMINATED = 128 + signal.SIGTERM
FLUSH_SECONDS = 0.5
"""How long a terminated replica waits for its output; with the rest it stays well under two seconds."""
EXIT_SECONDS = 10.0
"""How long a failed replica may spend on joining its threads and running its exit handlers."""
RUNTIME_THREADS = "fleet-"
"""Threads whose name begins so belong to the runtime: when one of them dies, so does the replica."""

_log = logging.getLogger(__name__)


class _Lifecycle:
    """What :func:`start` changed in this process, and how to change it back in a forked child."""

    def __init__(self) -> None:
        self.words = LastWords()
        self._observing = False
        self._status: int | None = None
        self._sigterm = SigtermWatcher()
        self._script = ScriptEnd()
        self._previous_hook = sys.excepthook
        self._previous_thread_hook = threading.excepthook

    def observe(self) -> None:
        """Serve the progress, and leave last words: as much as a plain script that only reports wants."""
        if self._observing:
            return
        self._observing = True
        self._previous_hook, sys.excepthook = sys.excepthook, self.on_uncaught
        self._previous_thread_hook, threading.excepthook = threading.excepthook, self.on_uncaught_in_thread
        self._script.watch()
        atexit.register(self.at_exit)
        if not self.words.started:
            self.words.identify(os.environ)
        _serve_progress(os.environ)

    def handle_sigterm(self) -> None:
        """End this process within two seconds of a SIGTERM, whatever its threads wait for."""
        self._sigterm.handle(self.on_sigterm)

    def on_sigterm(self) -> None:
        """End a replica that is stopped; a trainer whose script handles SIGTERM has its time before."""
        if self._sigterm.script_handles() and not self.words.is_server:
            if self.words.completed is None:
                self.words.leave_stop()
            _flush_within(FLUSH_SECONDS)  # whoever stops this process may give it less than the pod has
            time.sleep(seconds_to_save(os.environ))
        self._end_stopped()

    def is_stopped(self) -> bool:
        """Whether a SIGTERM has come before this replica had completed."""
        return self.words.completed is None and self._sigterm.is_received()

    def on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End the main thread: the traceback unless the user's mistake needs none, then one sentence."""
        if not isinstance(error, ConfigurationError):
            self._previous_hook(kind, error, trace)
        self._leave(error)
        _exit_after(EXIT_SECONDS, _exit_code(error))
        self._status = _exit_code(error)

    def on_uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        """End the replica when a thread dies of our error, or a thread of ours of any error."""
        error = args.exc_value
        if not isinstance(error, ConfigurationError):
            self._previous_thread_hook(args)
        ours = args.thread is not None and args.thread.name.startswith(RUNTIME_THREADS)
        if error is None or not (ours or isinstance(error, FleetError)):
            return
        self._leave(error)
        if self.is_stopped():
            return  # the script saves: it may, until the watcher of signals ends it
        _flush_within(FLUSH_SECONDS)
        os._exit(_exit_code(error))

    def at_exit(self) -> None:
        """Leave the last words, and the exit status of an error or of SIGTERM, where Python's is another."""
        if self.is_stopped():
            self._note_stop_at_exit()
        elif not self.words.failed and (reason := self._script.reason()):
            self.words.leave_failure(reason)
        elif self.words.started or self._script.is_well():  # else the log's end says more than the progress
            self.words.leave_progress()
        if self._status not in (None, EXIT_FAILURE):
            _flush_within(FLUSH_SECONDS)
            os._exit(self._status or EXIT_FAILURE)

    def undo_in_child(self) -> None:
        """Give a forked child the handlers of before: its end is not the replica's end."""
        self._sigterm.undo()
        if self._observing:
            if sys.excepthook == self.on_uncaught:
                sys.excepthook = self._previous_hook
            if threading.excepthook == self.on_uncaught_in_thread:
                threading.excepthook = self._previous_thread_hook
            self._script.undo()
            atexit.unregister(self.at_exit)

    def _leave(self, error: BaseException) -> None:
        """Leave the sentence of an error; that of a stop comes first, if this replica was told to stop."""
        self.words.failed = True
        if self.is_stopped():
            self.words.leave_stop()
        self.words.leave_error(error)

    def _note_stop_at_exit(self) -> None:
        """End as one that was stopped, unless the script ends with a status of its own."""
        if self._status is None and not self._script.has_chosen_failure():
            self._end_stopped()
        self.words.leave_stop()  # the watcher's thread may not have got so far

    def _end_stopped(self) -> NoReturn:
        self.words.failed = True
        self.words.leave_stop()
        _flush_within(FLUSH_SECONDS)
        os._exit(EXIT_TERMINATED)


_lifecycle = _Lifecycle()


def start(role: "Role | None") -> None:
    """Prepare this process to be a replica; a later call only says which.

    Installs the handling of SIGTERM and of uncaught errors, raises the limit of open files, shows the log,
    and serves the progress where ``FLEET_METRICS_PORT`` is set: on this replica's own address when
    ``PADDLE_CURRENT_IP`` is one of this machine's loopback addresses, on all interfaces in a pod.

    Parameters
    ----------
    role
        Which replica this is; it signs the progress and the messages. None where that has still to be found
        out, and may go wrong: until then the environment's word signs.
    """
    if role is not None:
        _lifecycle.words.name("PSERVER" if role.kind.name == "SERVER" else "TRAINER", role.index)
    elif not _lifecycle.words.started:
        _lifecycle.words.identify(os.environ)
    if _lifecycle.words.started:
        return
    _lifecycle.words.started = True
    resources.raise_descriptor_limit()
    _show_log()
    _lifecycle.observe()
    _lifecycle.handle_sigterm()


def joined() -> None:
    """Note that this replica has joined its job: what goes wrong from here on may go better the next time."""
    _lifecycle.words.join()


def failed() -> bool:
    """Return whether this process ends by an error, which has been told, or was told to stop."""
    return _lifecycle.words.failed or _lifecycle.is_stopped()


def refuses(call: str) -> bool:
    """Return whether `call` must not say that this replica has completed, as a SIGTERM has told it to stop.

    A script that handles SIGTERM goes on, and may leave its loop before its time. The log says it.
    """
    if not _lifecycle.is_stopped():
        return False
    _log.warning(
        "%s does nothing: %s was told to stop by SIGTERM, and has not completed",
        call,
        _lifecycle.words.identity,
    )
    return True


def finish(completed: Collection[int] = (), attempts: Mapping[int, int] | None = None) -> None:
    """Leave the progress as the termination message: this replica has done its work.

    What the script reports afterwards is added when the process exits.

    Parameters
    ----------
    completed : collection of int
        The trainers, by index, that this replica knows to have completed, itself among them if it is one.
    attempts : mapping of int to int, optional
        Of a server: under which attempt each of them did.
    """
    words = _lifecycle.words
    if words.started:
        words.completed, words.attempts = completed, attempts or {}
        words.leave_progress()


def end_completed(completed: Collection[int]) -> NoReturn:
    """End this replica well: its training has ended before, with these trainers.

    Raises
    ------
    SystemExit
        With status 0: there is nothing left to do.
    """
    joined()
    finish(completed)
    raise SystemExit(0)


def _exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, FleetError) else EXIT_FAILURE


def _show_log() -> None:
    """Print what this package logs, from INFO on, unless the script has set up logging: then as it says."""
    logger, last_resort = logging.getLogger("fleet"), logging.lastResort
    if logger.hasHandlers() or logger.level != logging.NOTSET or last_resort is None:
        return
    logger.setLevel(logging.INFO)
    last_resort.setLevel(logging.INFO)  # prints the message alone, and only where no handler is set up


def _serve_progress(environ: Mapping[str, str]) -> None:
    """Start the HTTP server as the environment asks; training goes on without it when it cannot start."""
    wanted = environ.get("FLEET_METRICS_PORT")
    if not wanted or environ.get("LOCAL_RANK", "0") != "0":
        return
    if not wanted.isascii() or not wanted.isdigit() or not 0 < int(wanted) < 65536:
        raise ConfigurationError(
            f"FLEET_METRICS_PORT is {wanted!r}; expected a port number, 1 to 65535: unset it to serve nothing"
        )
    host = environ.get("PADDLE_CURRENT_IP", "")
    bind = host if _is_loopback(host) else ""
    try:
        progress.start_server(bind, int(wanted))
    except OSError as error:
        _log.warning("the progress is not served: %s port %s: %s", bind or "every interface", wanted, error)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _flush_within(seconds: float) -> None:
    """Flush the output from a thread of its own: the lock of a stream may be held by one that waits."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()

    flusher = threading.Thread(target=flush, name="fleet-flush", daemon=True)
    try:
        flusher.start()
    except RuntimeError:  # Python 3.12 starts no thread in exit handlers
        flush()
    else:
        flusher.join(seconds)


def _exit_after(seconds: float, status: int) -> None:
    """End the process even if a thread that nobody stops, or an exit handler, would keep it for ever."""

    def end() -> None:
        print(f"ended: threads were still running {seconds:g} s after the error", file=sys.stderr, flush=True)
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


_imported_by, _hook_of_import = os.getpid(), sys.excepthook


def _on_early_mistake(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a script by its mistake as a replica, though `init` has not been called.

    An interactive session goes on after one, and a forked child's is not the replica's.
    """
    if isinstance(error, ConfigurationError) and os.getpid() == _imported_by and not hasattr(sys, "ps1"):
        with contextlib.suppress(ConfigurationError):  # the first mistake is told
            start(None)
        _lifecycle.on_uncaught(kind, error, trace)
    else:
        _hook_of_import(kind, error, trace)


_forking = threading.local()


def _hold_sigterm() -> None:
    """Let no SIGTERM in between a fork and the reset: the shared pipe would carry it to the parent."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _reset_in_child() -> None:
    global _lifecycle
    _lifecycle.undo_in_child()
    _lifecycle = _Lifecycle()
    _release_sigterm()


sys.excepthook = _on_early_mistake
progress.before_first_report(_lifecycle.observe)
os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_reset_in_child)
