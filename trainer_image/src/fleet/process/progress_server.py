"""The HTTP server that shows a replica's progress: as JSON, as Prometheus text, and to probes.

``GET /progress``
    The snapshot as JSON. Absent values are null.
``GET /metrics``
    The same numbers as Prometheus text.
``GET /healthz``
    200 while the process can answer at all.
``GET /readyz``
    200 while the process serves others, as a parameter server does; 503 otherwise.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fleet.process.connections import HalfOpen

__all__ = ["ProgressServer", "prometheus_text"]

REQUEST_TIMEOUT_SECONDS = 5.0
_log = logging.getLogger(__name__)

GAUGES = {
    "step": ("fleet_step", "The step that the script reported last, else the one that the runtime has made."),
    "totalSteps": ("fleet_total_steps", "The number of steps that the script intends to make."),
    "loss": ("fleet_loss", "The loss that the script reported last."),
    "samples": ("fleet_samples", "Samples trained on so far."),
    "samplesPerSecond": ("fleet_samples_per_second", "Samples per second, over the last ten seconds."),
    "memoryBytes": ("fleet_memory_bytes", "Bytes of this process that are in memory."),
    "parameterBytes": ("fleet_parameter_bytes", "Bytes of the dense parameters that this server holds."),
}

TABLES = {
    "rows": ("fleet_table_rows", "gauge", "Rows of an embedding table that this server holds."),
    "bytes": ("fleet_table_bytes", "gauge", "Bytes of memory that they, their state and their index take."),
    "rowsOnDisk": ("fleet_table_rows_on_disk", "gauge", "Rows that lie on a disk of this server."),
    "lookedUp": (
        "fleet_table_ids_looked_up_total",
        "counter",
        "Ids of a table that trainers have asked for.",
    ),
    "found": ("fleet_table_ids_found_total", "counter", "Of these, ids that had a row."),
    "shardSkew": (
        "fleet_table_shard_skew",
        "gauge",
        "How many times the mean's rows the fullest of this server's virtual shards has.",
    ),
}
"""What a server tells of each of its tables. A trainer's numbers are the servers' sums, and no metrics."""


def prometheus_text(state: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Render a snapshot in the Prometheus text format.

    Parameters
    ----------
    state : mapping
        What `fleet.process.progress.snapshot` returned.
    environ : mapping of str to str
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
        if state.get(key) is not None:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge", f"{name} {state[key]!r}"]
    reported = {name: value for name, value in state["metrics"].items() if value is not None}
    if reported:
        lines += [
            "# HELP fleet_metric A value that the script reported by name.",
            "# TYPE fleet_metric gauge",
        ]
        lines += [f'fleet_metric{{name="{name}"}} {value!r}' for name, value in reported.items()]
    lines += _of_tables([table for table in state["tables"] if "lookedUp" in table])
    for name, value in state["counters"].items():
        counter = f"fleet_{name}_total"
        about = f"Counted by the runtime: {name.replace('_', ' ')}."
        lines += [f"# HELP {counter} {about}", f"# TYPE {counter} counter", f"{counter} {value!r}"]
    return "\n".join(lines) + "\n"


def _of_tables(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for key, (name, kind, about) in TABLES.items() if tables else ():
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        lines += [f'{name}{{table="{_escaped(table["name"])}"}} {table[key]!r}' for table in tables]
    return lines


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class _Handler(BaseHTTPRequestHandler):
    """Answers the four paths; a client that stalls is dropped after REQUEST_TIMEOUT_SECONDS."""

    server: "ProgressServer"
    timeout = REQUEST_TIMEOUT_SECONDS
    server_version = "fleet"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/progress":
            self._answer(200, "application/json", json.dumps(self.server.snapshot()))
        elif path == "/metrics":
            self._answer(
                200, "text/plain; version=0.0.4", prometheus_text(self.server.snapshot(), os.environ)
            )
        elif path == "/healthz":
            self._answer(200, "text/plain", "ok\n")
        elif path == "/readyz":
            serves = self.server.serves()
            self._answer(200 if serves else 503, "text/plain", "ok\n" if serves else "not serving\n")
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


class ProgressServer(ThreadingHTTPServer):
    """The HTTP server, on a socket of our making: the base class asks DNS for the host's name first.

    Parameters
    ----------
    host : str
        The address to bind; empty for every interface.
    port : int
        0 lets the system choose.
    snapshot : callable
        Returns what is shown; see `fleet.process.progress.snapshot`.
    serves : callable
        Whether this process serves others now.

    Raises
    ------
    OSError
        The address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, host: str, port: int, snapshot: Callable[[], dict[str, Any]], serves: Callable[[], bool]
    ) -> None:
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.snapshot = snapshot
        self.serves = serves
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

    def start(self) -> None:
        """Answer from a daemon thread."""
        threading.Thread(target=self.serve_forever, name="fleet-progress", daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer, few at a time and each within ten seconds: anybody may ask, as slowly as he likes."""
        with self._readers.bounded(request):
            super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Note a client that went away or sent garbage; the base class prints a traceback for each."""
        _log.debug("a reader of the progress at %s failed", client_address, exc_info=True)
