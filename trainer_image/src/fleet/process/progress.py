"""How far this replica has come: what the script reports and the runtime counts, and who can read it.

One process has one :class:`Progress`. The script calls :func:`report`, the runtime calls :func:`count` and
says by :func:`follow` how many steps it has made, and everybody who shows progress (the table of
``fleetjob run``, the operator's status, Prometheus) reads the one snapshot that :func:`start_server` serves:

``GET /progress``
    The snapshot as JSON. Absent values are null.
``GET /metrics``
    The same numbers as Prometheus text.
``GET /healthz``
    200 while the process can answer at all.
``GET /readyz``
    200 while the process serves others, as a parameter server does; 503 otherwise.

Forked children (``DataLoader`` workers) inherit neither the server nor a lock that somebody else holds: the
child closes its copy of the listening socket and starts with counters of its own that nobody serves.
"""

import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, SupportsFloat, SupportsIndex

from fleet.errors import ConfigurationError
from fleet.process.half_open import HalfOpen

__all__ = [
    "Progress",
    "close",
    "count",
    "follow",
    "identify",
    "made",
    "report",
    "serves",
    "snapshot",
    "start_server",
]

MAX_HISTORY = 512
RATE_WINDOW_SECONDS = 10.0
REQUEST_TIMEOUT_SECONDS = 5.0
NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")

_log = logging.getLogger(__name__)

Number = SupportsFloat | SupportsIndex


class Progress:
    """The numbers of one replica, safe to write and read from any thread.

    Parameters
    ----------
    clock : callable
        Seconds of a monotonic clock; only the rate of samples depends on it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._role: str | None = None
        self._index: int | None = None
        self._step: int | None = None
        self._count_made: Callable[[], int] | None = None
        self._made = 0
        self._total_steps: int | None = None
        self._loss: float | None = None
        self._samples: int | None = None
        self._metrics: dict[str, float] = {}
        self._counters: dict[str, int | float] = {}
        self._history: list[tuple[int, float]] = []
        self._latest: tuple[int, float] | None = None
        self._stride = 1
        self._skipped = 0
        self._rate: deque[tuple[float, int]] = deque()
        self._warned_about_loss = False

    def identify(self, role: str, index: int) -> None:
        """Say which replica of the job these numbers belong to."""
        with self._lock:
            self._role, self._index = role, index

    def follow(self, made: Callable[[], int]) -> None:
        """Take the step from the runtime for as long as the script reports none; see :func:`follow`."""
        with self._lock:
            self._count_made = made

    def made(self) -> int | None:
        """Return how many steps the runtime has made; see :func:`made`."""
        with self._lock:
            return None if self._count_made is None else self._count_made()

    def report(
        self,
        *,
        step: int | None = None,
        total_steps: int | None = None,
        loss: Number | None = None,
        samples: int | None = None,
        **metrics: Number,
    ) -> None:
        """Replace the given values; see :func:`report`."""
        step = _count_of("step", step)
        total_steps = _count_of("total_steps", total_steps)
        samples = _count_of("samples", samples)
        number = None if loss is None else _number_of("loss", loss)
        checked = {name: _number_of(_checked_name(name), value) for name, value in metrics.items()}
        now = self._clock()
        with self._lock:
            if step is not None:
                self._step = step
            if total_steps is not None:
                self._total_steps = total_steps
            if samples is not None:
                self._samples = samples
                self._rate.append((now, samples))
                while len(self._rate) > 2 and now - self._rate[1][0] >= RATE_WINDOW_SECONDS:
                    self._rate.popleft()
            if number is not None:
                self._loss = number
                self._record(number)
            self._metrics.update(checked)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of the runtime; see :func:`count`."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def snapshot(self) -> dict[str, Any]:
        """Return the present state as JSON-ready data; values never reported are None."""
        with self._lock:
            history = list(self._history)
            if self._latest is not None and (not history or history[-1] != self._latest):
                history.append(self._latest)
            return {
                "role": self._role,
                "index": self._index,
                "step": self._current_step(),
                "totalSteps": self._total_steps,
                "loss": _finite(self._loss),
                "samples": self._samples,
                "samplesPerSecond": self._samples_per_second(),
                "metrics": {name: _finite(value) for name, value in self._metrics.items()},
                "history": [[step, loss] for step, loss in history],
                "counters": dict(self._counters),
            }

    def _current_step(self) -> int | None:
        """Return the reported step, else the runtime's, once it has made one: also when it is gone."""
        if self._step is not None:
            return self._step
        self._made = (self._count_made() if self._count_made is not None else 0) or self._made
        return self._made or None

    def _record(self, loss: float) -> None:
        """Add (step, loss) to the history, which keeps every n-th report: n doubles whenever it is full."""
        step = self._current_step()
        if not math.isfinite(loss):
            if not self._warned_about_loss:
                self._warned_about_loss = True
                _log.warning("the reported loss is %s at step %s", loss, step)
            return
        if step is None:
            return
        self._latest = (step, loss)
        if self._skipped > 0:
            self._skipped -= 1
            return
        self._history.append(self._latest)
        self._skipped = self._stride - 1
        if len(self._history) == MAX_HISTORY - 1:  # one place stays free for the latest point
            self._history = self._history[::2]
            self._stride *= 2
            self._skipped = self._stride - 1

    def _samples_per_second(self) -> float | None:
        if len(self._rate) < 2:
            return None
        (start, before), (end, after) = self._rate[0], self._rate[-1]
        return (after - before) / (end - start) if end > start and after >= before else None


def _count_of(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        found = f"{value!r} ({type(value).__name__})"
        raise ConfigurationError(f"fleet.report: {name} is {found}; expected a whole number, 0 or more")
    number = value.__index__()
    if number < 0:
        raise ConfigurationError(f"fleet.report: {name} is {number}; expected a whole number, 0 or more")
    return int(number)


def _number_of(name: str, value: Any) -> float:
    if hasattr(value, "detach"):  # torch warns about a number taken out of a graph
        value = value.detach()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        found = f"{str(value)[:60]!r} ({type(value).__name__})"
        raise ConfigurationError(f"fleet.report: {name} is {found}; expected one number") from error


def _checked_name(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"fleet.report: {name!r} is no name for a metric; expected letters, digits and underscores"
        )
    return name


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: a value that is one of them is absent there."""
    return value if value is not None and math.isfinite(value) else None


GAUGES = {
    "step": ("fleet_step", "The step that the script reported last, else the one that the runtime has made."),
    "totalSteps": ("fleet_total_steps", "The number of steps that the script intends to make."),
    "loss": ("fleet_loss", "The loss that the script reported last."),
    "samples": ("fleet_samples", "Samples trained on so far."),
    "samplesPerSecond": ("fleet_samples_per_second", "Samples per second, over the last ten seconds."),
}


def prometheus_text(state: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Render a snapshot in the Prometheus text format.

    Parameters
    ----------
    state
        What :func:`snapshot` returned.
    environ
        The process environment: job name and attempt label ``fleet_replica_info``.
    """
    labels = {
        "job": environ.get("FLEET_JOB_NAME", ""),
        "role": state["role"] or "",
        "index": "" if state["index"] is None else str(state["index"]),
        "attempt": environ.get("FLEET_RESTARTS", "0"),
    }
    info = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    lines = [
        "# HELP fleet_replica_info Which replica of which job this is.",
        "# TYPE fleet_replica_info gauge",
        f"fleet_replica_info{{{info}}} 1",
    ]
    for key, (name, about) in GAUGES.items():
        if state[key] is not None:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge", f"{name} {state[key]!r}"]
    reported = {name: value for name, value in state["metrics"].items() if value is not None}
    if reported:
        lines += [
            "# HELP fleet_metric A value that the script reported by name.",
            "# TYPE fleet_metric gauge",
        ]
        lines += [f'fleet_metric{{name="{name}"}} {value!r}' for name, value in reported.items()]
    for name, value in state["counters"].items():
        counter = f"fleet_{name}_total"
        about = f"Counted by the runtime: {name.replace('_', ' ')}."
        lines += [f"# HELP {counter} {about}", f"# TYPE {counter} counter", f"{counter} {value!r}"]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class _Handler(BaseHTTPRequestHandler):
    """Answers the four paths; a client that stalls is dropped after REQUEST_TIMEOUT_SECONDS."""

    timeout = REQUEST_TIMEOUT_SECONDS
    server_version = "fleet"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/progress":
            self._answer(200, "application/json", json.dumps(snapshot()))
        elif path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4", prometheus_text(snapshot(), os.environ))
        elif path == "/healthz":
            self._answer(200, "text/plain", "ok\n")
        elif path == "/readyz":
            self._answer(*((200, "text/plain", "ok\n") if _serves else (503, "text/plain", "not serving\n")))
        else:
            self._answer(
                404, "text/plain", "not found; there are /progress, /metrics, /healthz and /readyz\n"
            )

    def _answer(self, status: int, content_type: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is http.server's)
        _log.debug(format, *args)


class _Server(ThreadingHTTPServer):
    """The HTTP server, on a socket of our making: the base class asks DNS for the host's name first."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self._readers = HalfOpen()
        self.socket.close()
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.socket = socket.create_server((host, port), family=family)
        elif socket.has_dualstack_ipv6():
            self.socket = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self.socket = socket.create_server(("", port))
        self.server_address = self.socket.getsockname()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer, few at a time and each within ten seconds: anybody may ask, as slowly as he likes."""
        with self._readers.bounded(request):
            super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Note a client that went away or sent garbage; the base class prints a traceback for each."""
        _log.debug("a reader of the progress at %s failed", client_address, exc_info=True)


_progress = Progress()
_server: _Server | None = None
_serves = False
_before_first_report: Callable[[], None] | None = None


def before_first_report(act: Callable[[], None]) -> None:
    """Have `act` called once, by the first report: a plain script has no ``fleet.init`` that would."""
    global _before_first_report
    _before_first_report = act


def report(
    *,
    step: int | None = None,
    total_steps: int | None = None,
    loss: Number | None = None,
    samples: int | None = None,
    **metrics: Number,
) -> None:
    """Tell everybody who watches this job how far this replica has come.

    Parameters
    ----------
    step, total_steps : int, optional
        The step just made and how many there will be. Without a step, the one that the runtime has made.
    loss : number or tensor of one element, optional
        The loss of this step. Together with the step it becomes a point of the loss curve, which keeps at
        most 512 points: of a longer run every second, fourth, … report.
    samples : int, optional
        How many samples this replica has trained on since it began; their rate is computed from it.
    **metrics : number or tensor of one element
        Anything else worth showing, for example ``test_accuracy=0.97``. The last value of a name counts.

    Raises
    ------
    ConfigurationError
        A value is no number, or a count is negative or no whole number; the message names the argument.
    """
    global _before_first_report
    act, _before_first_report = _before_first_report, None
    if act is not None:
        act()
    _progress.report(step=step, total_steps=total_steps, loss=loss, samples=samples, **metrics)


def follow(made: Callable[[], int]) -> None:
    """Show the runtime's own step for as long as the script reports none.

    Parameters
    ----------
    made : callable
        Returns how many steps have been made, 0 before the first and when nobody knows any more. Any
        thread may call it.
    """
    _progress.follow(made)


def made() -> int | None:
    """Return how many steps the runtime has made, as :func:`follow` says; None in a process without one."""
    return _progress.made()


def count(name: str, amount: float = 1) -> None:
    """Add `amount` to the counter `name`, which Prometheus sees as ``fleet_{name}_total``."""
    _progress.count(name, amount)


def snapshot() -> dict[str, Any]:
    """Return what has been reported and counted so far, as JSON-ready data."""
    return _progress.snapshot()


def serves(now: bool) -> None:
    """Say whether this process serves others now, for probes."""
    global _serves
    _serves = now


def identify(role: str, index: int) -> None:
    """Say which replica this process is: TRAINER or PSERVER, and its index."""
    _progress.identify(role, index)


def start_server(host: str, port: int) -> tuple[str, int]:
    """Serve the progress over HTTP from a daemon thread.

    Parameters
    ----------
    host
        The address to bind; the empty string means every interface.
    port
        The port; 0 lets the system choose.

    Returns
    -------
    tuple of str and int
        The address and port that are bound. A second call changes nothing and returns those of the first.

    Raises
    ------
    OSError
        The address cannot be bound.
    """
    global _server
    if _server is None:
        _server = _Server(host, port)
        threading.Thread(target=_server.serve_forever, name="fleet-progress", daemon=True).start()
    bound = _server.socket.getsockname()
    return str(bound[0]), int(bound[1])


def close() -> None:
    """Stop serving; what was reported stays readable in this process."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.shutdown()
        server.server_close()


def _start_afresh_in_child() -> None:
    """Leave the parent's server to the parent; a lock copied while it was held would never be released."""
    global _progress, _server, _before_first_report
    _before_first_report = None
    if _server is not None:
        _server.socket.close()
    _server = None
    _progress = Progress()


os.register_at_fork(after_in_child=_start_afresh_in_child)
