"""The lifecycle of a replica: signals, uncaught errors, progress, and the termination message.

A container's main process is PID 1, for which the kernel ignores SIGTERM unless the process handles it.
Python runs signal handlers only between bytecodes of the main thread, so a main thread that waits for a lock
or runs a C function would not end before the kubelet's SIGKILL. Therefore the interpreter's wake-up file
descriptor reports SIGTERM to a thread, which flushes the output, writes the termination message and ends the
process without unwinding the stack. A trainer whose script handles SIGTERM gets most of the pod's grace
period to save and exit. Such a trainer does not count as completed, whatever its exit status: otherwise the
rest of its training would be silently lost.

An uncaught error ends a replica with the exit status of its type and with one sentence, on stderr and as the
termination message. This holds for the user's mistakes as soon as `fleet` is imported, and for all errors
after :func:`start`. In forked children, the handlers from before :func:`start` are restored.
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
import traceback
from collections.abc import Callable, Collection, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from fleet.errors import EXIT_FAILURE, ConfigurationError, FleetError
from fleet.process import progress, reporting, resources, termination
from fleet.process.progress import Number

if TYPE_CHECKING:
    from fleet.role_maker import Role

__all__ = [
    "POD_GRACE_SECONDS",
    "end_completed",
    "failed",
    "finish",
    "joined",
    "refuses",
    "report",
    "start",
]

EXIT_TERMINATED: Final = 128 + signal.SIGTERM
POD_GRACE_SECONDS: Final = 30
"""The Kubernetes default of terminationGracePeriodSeconds."""
SAVING_SHARE: Final = 0.75
"""The share of the grace period for a script that handles SIGTERM; its launcher must outlive the script."""
TORCHRUN: Final = "TORCHELASTIC_RUN_ID"
"""An environment variable that torchrun sets for its workers."""
TORCHRUN_SECONDS: Final = 30
"""The grace period that torchrun gives its workers, regardless of the pod's grace period."""
FLUSH_SECONDS = 0.5
"""The time limit for flushing the output of a terminated replica, which ends well within two seconds."""
REPORT_SECONDS: Final = 60.0
"""The time limit for reporters to write their last values when a replica ends without an error."""
REPORT_SECONDS_OF_FAILED: Final = 5.0
EXIT_SECONDS = 10.0
"""The time limit for a failed replica to join its threads and run its exit handlers."""
RUNTIME_THREADS: Final = "fleet-"
"""The name prefix of the runtime's threads: if one of them fails, the replica ends."""
_PING: Final = 0
"""A byte written to the signal pipe; when it is read, all earlier signals have been read as well."""
_PING_SECONDS: Final = 1.0

_log = logging.getLogger(__name__)


class _SigtermWatcher:
    """Calls a function on SIGTERM, in addition to any handler of the script."""

    def __init__(self) -> None:
        self._wakeup: tuple[int, int] | None = None
        self._owns_wakeup = True
        self._previous_handler: Any = signal.SIG_DFL
        self._received = False
        self._pings = self._pongs = 0

    def watch(self, act: Callable[[], None]) -> None:
        """From now on, call `act` in a separate thread on each SIGTERM."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "fleet.init was called outside the main thread, where Python allows no signal handlers: as "
                "PID 1 of a container this replica ignores SIGTERM, and a stopped replica may count as "
                "completed"
            )
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is signal.SIG_IGN:
            return
        self._previous_handler = previous
        self._wakeup = reader, writer = os.pipe()
        # `set_wakeup_fd` refuses a blocking descriptor.
        os.set_blocking(writer, False)
        threading.Thread(target=self._run, args=(reader, act), name="fleet-lifecycle", daemon=True).start()
        taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if taken != -1:  # an event loop owns the wake-up descriptor; our handler wakes the thread instead
            signal.set_wakeup_fd(taken)
            self._owns_wakeup = False
        # Needed in any case: Python writes to the wake-up descriptor only for signals with a Python handler.
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def is_received(self) -> bool:
        """Return whether SIGTERM has been received, even if the watcher thread has not read it yet."""
        if self._wakeup is not None and not self._received:
            self._pings = ping = self._pings + 1
            os.write(self._wakeup[1], bytes([_PING]))
            deadline = time.monotonic() + _PING_SECONDS
            while self._pongs < ping and not self._received and time.monotonic() < deadline:
                time.sleep(
                    0.001
                )  # polls without a lock, because a signal handler may interrupt the main thread here
        return self._received

    def script_handles(self) -> bool:
        """Return whether the script handled the SIGTERM.

        If our handler is no longer installed, the script must have installed its own handler before the
        signal arrived: otherwise this process would have ended. The script may have restored the default
        handler since.
        """
        return signal.getsignal(signal.SIGTERM) != self._on_sigterm or callable(self._previous_handler)

    def undo(self) -> None:
        """Restore the previous handler in a forked child."""
        if self._wakeup is None:
            return
        if self._owns_wakeup:
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            # None stands for a handler of C code, which Python cannot restore.
            signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)
        for descriptor in self._wakeup:
            os.close(descriptor)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Wake the watcher's thread and call the previous handler.

        Python itself does not wake the watcher if another library owns the wake-up descriptor.
        """
        if self._wakeup is not None:
            os.write(self._wakeup[1], bytes([number]))
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    def _run(self, reader: int, act: Callable[[], None]) -> None:
        while received := os.read(reader, 64):
            if signal.SIGTERM in received:
                self._received = True
                act()
            self._pongs += received.count(_PING)


class _Lifecycle:
    """The identity and state of this replica, and the hooks that end it."""

    def __init__(self) -> None:
        self.identity = "this process"
        self.is_server = False
        self.started = False
        self.failed = False
        self.joined = False
        self._step_at_join = 0
        self._completed: Collection[int] | None = None
        self._attempts: Mapping[int, int] = {}
        self._observing = False
        self._status: int | None = None
        """The exit status of the error that ends the main thread."""
        self._sigterm = _SigtermWatcher()
        self._exit = sys.exit
        self._exit_argument: Any = None
        """The argument of the main thread's last call of ``sys.exit``."""
        self._previous_hook = sys.excepthook
        self._previous_thread_hook = threading.excepthook

    def start(self) -> None:
        """Install all hooks of a replica and raise its resource limits; later calls do nothing."""
        if self.started:
            return
        self.started = True
        resources.raise_descriptor_limit()
        _show_log()
        self.observe()
        reporting.check(os.environ)
        self._sigterm.watch(self.on_sigterm)

    def observe(self) -> None:
        """Serve progress, and install the hooks that write a termination message.

        A plain script, which only reports its progress, needs nothing else.
        """
        if self._observing:
            return
        self._observing = True
        self._previous_hook, sys.excepthook = sys.excepthook, self.on_uncaught
        self._previous_thread_hook, threading.excepthook = threading.excepthook, self.on_uncaught_in_thread
        self._exit, sys.exit = sys.exit, self.on_exit
        atexit.register(self.at_exit)
        if not self.started:
            self.identify(os.environ)
        _serve_progress(os.environ)

    def undo_in_child(self) -> None:
        """Restore the previous hooks in a forked child, whose end is not the end of the replica."""
        self._sigterm.undo()
        if self._observing:
            if sys.excepthook == self.on_uncaught:
                sys.excepthook = self._previous_hook
            if threading.excepthook == self.on_uncaught_in_thread:
                threading.excepthook = self._previous_thread_hook
            if sys.exit == self.on_exit:
                sys.exit = self._exit
            atexit.unregister(self.at_exit)

    def identify(self, environ: Mapping[str, str]) -> None:
        """Name this process after the role and index in its environment, if an index is set."""
        role = environ.get("PADDLE_TRAINING_ROLE", "TRAINER")
        index = environ.get("PADDLE_PSERVER_ID") if role == "PSERVER" else None
        names = ("PADDLE_TRAINER_ID", "RANK", "NODE_RANK")  # without a rank, the pod's number
        index = index or next((environ[name] for name in names if environ.get(name)), "")
        if role in ("PSERVER", "TRAINER") and index.isascii() and index.isdigit():
            self.name(role, int(index))

    def name(self, role: str, index: int) -> None:
        """Set the role and index by which progress and messages identify this process."""
        self.identity, self.is_server = f"{role.lower()} {index}", role == "PSERVER"
        progress.identify(role, index)

    def join(self) -> None:
        """Record that this replica has joined its job at the current step."""
        self.joined, self._step_at_join = True, _current_step()

    def complete(self, completed: Collection[int], attempts: Mapping[int, int]) -> None:
        """Record that this replica has completed, and write progress as the termination message."""
        self._completed, self._attempts = completed, attempts
        self.continue_after_exit()
        self.leave_progress()

    def continue_after_exit(self) -> None:
        """Discard the argument of an earlier ``sys.exit``, which the script must have caught."""
        if threading.current_thread() is threading.main_thread():
            self._exit_argument = None

    def is_stopped(self) -> bool:
        """Return whether SIGTERM was received before this replica completed."""
        return self._completed is None and self._sigterm.is_received()

    def on_sigterm(self) -> None:
        """End this replica; if a trainer's script handles SIGTERM, first give it time to save."""
        if self._sigterm.script_handles() and not self.is_server:
            if self._completed is None:
                self.leave_stop()
            _flush_within(FLUSH_SECONDS)  # SIGKILL may come before the grace period ends
            time.sleep(_seconds_to_save(os.environ))
        self._end_stopped()

    def on_exit(self, status: Any = None, /) -> NoReturn:
        """Record the argument of ``sys.exit``, which exit handlers cannot read, and then exit."""
        if threading.current_thread() is threading.main_thread():
            self._exit_argument = status
        self._exit(status)

    def on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report the error that ends the main thread; print a traceback unless it is a user error."""
        if not isinstance(error, ConfigurationError):
            self._previous_hook(kind, error, trace)
        self._leave_error(error)
        self._status = _exit_code(error)
        _exit_after(EXIT_SECONDS, self._status)

    def on_uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        """End the replica if any thread raises a FleetError, or a runtime thread raises any error."""
        error = args.exc_value
        if not isinstance(error, ConfigurationError):
            self._previous_thread_hook(args)
        ours = args.thread is not None and args.thread.name.startswith(RUNTIME_THREADS)
        if error is None or not (ours or isinstance(error, FleetError)):
            return
        self._leave_error(error)
        if self.is_stopped():
            return  # the script is saving; the SIGTERM watcher ends it in time
        reporting.close(FLUSH_SECONDS)
        _flush_within(FLUSH_SECONDS)
        os._exit(_exit_code(error))

    def at_exit(self) -> None:
        """Write the termination message, and exit with the status of the error or of SIGTERM."""
        failed = self.failed or self._status is not None
        reporting.close(REPORT_SECONDS_OF_FAILED if failed else REPORT_SECONDS)
        chose_failure = self._exit_argument not in (None, 0)
        text = "" if isinstance(self._exit_argument, int | None) else str(self._exit_argument)
        if self.is_stopped():
            if self._status is None and not chose_failure:
                self._end_stopped()
            self.leave_stop()  # the watcher's thread may not have written it yet
            if self._status is None:
                # The script may have caught that exit. Python would then exit with 0, as if it had completed.
                chosen = self._exit_argument & 0xFF if isinstance(self._exit_argument, int) else EXIT_FAILURE
                _flush_within(FLUSH_SECONDS)
                os._exit(chosen or EXIT_TERMINATED)
        elif text and not self.failed:
            self.leave_failure(" ".join(text.split()))
        elif self.started or not (chose_failure or hasattr(sys, "last_value")):
            # If a plain script fails, the end of its log is more useful than its progress. `last_value` is
            # the uncaught exception, which Python keeps even if the script has replaced our hook.
            self.leave_progress()
        # After an uncaught error Python itself ends with status 1, so any other status must be set here.
        if self._status not in (None, EXIT_FAILURE):
            _flush_within(FLUSH_SECONDS)
            os._exit(self._status or EXIT_FAILURE)

    def leave_progress(self) -> None:
        """Write the termination message of a successful replica, from only one process per pod."""
        if self._is_one_of_several() and TORCHRUN in os.environ:
            return  # a message would hide torchrun's own message if another worker fails
        if not self.failed and os.environ.get("LOCAL_RANK", "0") == "0":
            state = progress.snapshot()
            if self.started:
                completed = termination.completed_trainers(self._completed or (), self._attempts)
                state = {"joined": self.joined, **completed, **state}
            termination.write_progress(state, os.environ)

    def leave_failure(self, sentence: str) -> None:
        """Write the termination message of a replica that failed."""
        if not self._is_one_of_several():  # otherwise its launcher reports which process failed first
            termination.write_failure(f"{self.identity}{self._stage()}: {sentence}", os.environ)

    def leave_stop(self) -> None:
        """Write the termination message of a replica that was stopped."""
        if TORCHRUN not in os.environ:  # otherwise a worker failed, which torchrun itself reports
            termination.write_failure(f"{self.identity} was stopped by SIGTERM", os.environ)

    def _leave_error(self, error: BaseException) -> None:
        """Write an error's message as the termination message; print fleet's own errors on stderr as well.

        If SIGTERM was received first, the message states instead that the replica was stopped.
        """
        self.failed = True
        if self.is_stopped():
            self.leave_stop()
        sentence = _one_sentence(error)
        if isinstance(error, FleetError):
            with contextlib.suppress(OSError, ValueError):  # a closed stderr must not hide the exit status
                print(f"{self.identity}: {sentence}", file=sys.stderr, flush=True)
        self.leave_failure(sentence)

    def _end_stopped(self) -> NoReturn:
        self.failed = True
        self.leave_stop()
        reporting.close(FLUSH_SECONDS)
        _flush_within(FLUSH_SECONDS)
        os._exit(EXIT_TERMINATED)

    def _stage(self) -> str:
        """Return whether this replica has joined, in the form that the operator parses."""
        if not self.started:
            return ""
        if not self.joined:
            return " (not joined)"
        return " (joined)" if _current_step() != self._step_at_join else " (joined, no step made)"

    def _is_one_of_several(self) -> bool:
        """Return whether this process was launched together with others but has not started as a replica."""
        return not self.started and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"


_lifecycle = _Lifecycle()
_imported_by, _hook_at_import = os.getpid(), sys.excepthook


def start(role: "Role | None") -> None:
    """Set up this process as a replica; later calls only set its role.

    This installs the handling of SIGTERM and of uncaught errors, raises the limit on open files, and shows
    the log. If ``FLEET_METRICS_PORT`` is set, it also serves the progress: on this replica's own address if
    ``PADDLE_CURRENT_IP`` is one of this machine's loopback addresses, and otherwise (in a pod) on all
    interfaces.

    Parameters
    ----------
    role
        The role and index, which name this process in its progress and its messages. None if they are not
        known yet; the name then comes from the environment.
    """
    if role is not None:
        _lifecycle.name("PSERVER" if role.kind.name == "SERVER" else "TRAINER", role.index)
    elif not _lifecycle.started:
        _lifecycle.identify(os.environ)
    _lifecycle.start()


def report(
    metrics: Mapping[str, Number] | None = None,
    *,
    step: int | None = None,
    total_steps: int | None = None,
    loss: Number | None = None,
    samples: int | None = None,
) -> None:
    """Report this replica's progress for ``fleetjob run``, the operator's status and Prometheus.

    The values also go to the reporters that ``FLEET_REPORTERS`` names, such as ``tensorboard``.

    Parameters
    ----------
    metrics : mapping of str to number or tensor of one element, optional
        Any values to show, for example ``{"test_accuracy": 0.97}``. The latest value of each name is kept. A
        name consists of letters, digits and underscores.
    step, total_steps : int, optional
        The step that has just been run, and the planned number of steps. The default of `step` is the
        runtime's own count.
    loss : number or tensor of one element, optional
        The loss of this step. The step and the loss become a point of the loss curve, which has at most 512
        points: in a longer run, the curve keeps only every second, fourth, … report.
    samples : int, optional
        The number of samples on which this replica has trained so far; determines the sample rate.

    Raises
    ------
    ConfigurationError
        A value is not a number, or a count is negative or not a whole number; the message names the argument.
        In the first call: the package of a reporter is not installed.
    """
    if os.getpid() == _imported_by:  # a forked child's reports are its own
        _lifecycle.observe()
        _lifecycle.continue_after_exit()
    at, values = progress.report(metrics, step=step, total_steps=total_steps, loss=loss, samples=samples)
    reporting.log(values, at, _lifecycle.identity, os.environ)


def joined() -> None:
    """Record that this replica has joined its job; later failures can be retried."""
    _lifecycle.join()


def failed() -> bool:
    """Return whether this process is ending because of a reported error or SIGTERM."""
    return _lifecycle.failed or _lifecycle.is_stopped()


def refuses(call: str) -> bool:
    """Return True and log the reason if SIGTERM prevents `call` from completing this replica.

    A script that handles SIGTERM continues, and may leave its training loop early.
    """
    if not _lifecycle.is_stopped():
        return False
    _log.warning("%s does nothing: %s has received SIGTERM, and has not completed", call, _lifecycle.identity)
    return True


def finish(completed: Collection[int] = (), attempts: Mapping[int, int] | None = None) -> None:
    """Record that this replica has completed, and write progress as the termination message.

    The exit handler writes the message again, with reports that the script has made since.

    Parameters
    ----------
    completed : collection of int
        The indexes of the trainers known to have completed, including this replica if it is a trainer.
    attempts : mapping of int to int, optional
        On a server, the attempt in which each trainer completed.
    """
    if _lifecycle.started:
        _lifecycle.complete(completed, attempts or {})


def end_completed(completed: Collection[int]) -> NoReturn:
    """End this replica successfully because the given trainers have already completed the training.

    Raises
    ------
    SystemExit
        With status 0: there is nothing left to do.
    """
    joined()
    finish(completed)
    raise SystemExit(0)


def _seconds_to_save(environ: Mapping[str, str]) -> float:
    """Return how many seconds a script that handles SIGTERM may keep running."""
    given = environ.get("FLEET_GRACE_SECONDS", "").strip()
    grace = int(given) if given.isascii() and given.isdigit() else POD_GRACE_SECONDS
    if TORCHRUN in environ:
        grace = min(grace, TORCHRUN_SECONDS)
    return grace * SAVING_SHARE


def _current_step() -> int:
    return int(progress.snapshot()["step"] or 0)


def _exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, FleetError) else EXIT_FAILURE


def _one_sentence(error: BaseException) -> str:
    """Return an error as one line of text, with its type and location unless it is a FleetError."""
    message = " ".join(str(error).split())
    if isinstance(error, FleetError):
        return message or type(error).__name__
    sentence = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{sentence} (at {frames[-1].filename}:{frames[-1].lineno})" if frames else sentence


def _show_log() -> None:
    """Print fleet's log from level INFO unless the script configures logging itself."""
    logger, last_resort = logging.getLogger("fleet"), logging.lastResort
    if logger.hasHandlers() or logger.level != logging.NOTSET or last_resort is None:
        return
    logger.setLevel(logging.INFO)
    last_resort.setLevel(logging.INFO)  # prints only the message, and only without other handlers


def _serve_progress(environ: Mapping[str, str]) -> None:
    """Start the progress server if the environment requests it; log a warning if this fails."""
    port = environ.get("FLEET_METRICS_PORT")
    if not port or environ.get("LOCAL_RANK", "0") != "0":
        return
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"FLEET_METRICS_PORT is {port!r}; expected a port number, 1 to 65535, or no value to serve "
            "nothing"
        )
    from fleet.process.progress_server import start_server  # imported late, to keep `import fleet` fast

    host = environ.get("PADDLE_CURRENT_IP", "")
    bind = host if _is_loopback(host) else ""
    try:
        start_server(bind, int(port))
    except OSError as error:
        _log.warning("the progress is not served: %s port %s: %s", bind or "every interface", port, error)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _flush_within(seconds: float) -> None:
    """Flush the output in another thread, with a time limit in case a blocked thread holds a lock."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()

    flusher = threading.Thread(target=flush, name="fleet-flush", daemon=True)
    try:
        flusher.start()
    except RuntimeError:  # Python 3.12 cannot start a thread in exit handlers
        flush()
    else:
        flusher.join(seconds)


def _exit_after(seconds: float, status: int) -> None:
    """End the process after a delay even if threads or exit handlers are still running."""

    def end() -> None:
        print(f"ended: threads were still running {seconds:g} s after the error", file=sys.stderr, flush=True)
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _on_early_mistake(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report a user error as a replica would, even if the script fails before it calls `fleet.init`.

    Interactive sessions and forked children are exempt.
    """
    if isinstance(error, ConfigurationError) and os.getpid() == _imported_by and not hasattr(sys, "ps1"):
        with contextlib.suppress(ConfigurationError):  # the first mistake is the one to report
            start(None)
        _lifecycle.on_uncaught(kind, error, trace)
    else:
        _hook_at_import(kind, error, trace)


_forking = threading.local()


def _block_sigterm() -> None:
    """Block SIGTERM while forking, until the child no longer shares the parent's pipe."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _reset_in_child() -> None:
    global _lifecycle
    _lifecycle.undo_in_child()
    _lifecycle = _Lifecycle()
    _unblock_sigterm()


sys.excepthook = _on_early_mistake
os.register_at_fork(before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_reset_in_child)
