"""The HTTP server of a replica's progress: JSON, Prometheus metrics, and health probes.

``GET /progress``
    The snapshot as JSON. Absent values are null.
``GET /metrics``
    The same numbers as Prometheus metrics.
``GET /healthz``
    200 while the process is alive.
``GET /readyz``
    200 while the process serves requests, as a parameter server does; 503 otherwise.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from fleet.process import progress
from fleet.process.connections import HalfOpen

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["close", "prometheus_text", "start_server"]

REQUEST_TIMEOUT_SECONDS: Final = 5.0
_log = logging.getLogger(__name__)

GAUGES: Final = {
    "step": ("fleet_step", "The latest step that the script reported, or else the runtime's step count."),
    "totalSteps": ("fleet_total_steps", "The number of steps that the script plans to run."),
    "loss": ("fleet_loss", "The latest loss that the script reported."),
    "samples": ("fleet_samples", "Samples trained on so far."),
    "samplesPerSecond": ("fleet_samples_per_second", "Samples per second, over the last ten seconds."),
    "memoryBytes": ("fleet_memory_bytes", "Resident memory of this process, in bytes."),
    "parameterBytes": ("fleet_parameter_bytes", "Bytes of the dense parameters that this server holds."),
}

TABLES: Final = {
    "rows": ("fleet_table_rows", "gauge", "Rows of an embedding table that this server holds."),
    "bytes": ("fleet_table_bytes", "gauge", "Memory of these rows, their state and their index, in bytes."),
    "rowsOnDisk": ("fleet_table_rows_on_disk", "gauge", "Rows on this server's disk."),
    "lookedUp": ("fleet_table_ids_looked_up", "counter", "Ids that trainers have looked up in a table."),
    "found": ("fleet_table_ids_found", "counter", "Ids looked up by trainers that had a row."),
    "shardSkew": (
        "fleet_table_shard_skew",
        "gauge",
        "Rows of this server's fullest virtual shard, as a multiple of the mean.",
    ),
}
"""The metrics of a server's tables; a trainer's numbers are sums over the servers and are not exported."""


class _Metrics:
    """A Prometheus collector of one snapshot."""

    def __init__(self, state: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self._state = state
        self._environ = environ

    def collect(self) -> Iterator["Metric"]:
        """Yield every metric that has a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._state
        labels = {
            "job": self._environ.get("FLEET_JOB_NAME", ""),
            "role": state["role"] or "",
            "index": "" if state["index"] is None else str(state["index"]),
            "attempt": self._environ.get("FLEET_RESTARTS", "0"),
        }
        info = GaugeMetricFamily(
            "fleet_replica_info", "The job and the replica of this process.", labels=list(labels)
        )
        info.add_metric(list(labels.values()), 1)
        yield info
        for key, (name, about) in GAUGES.items():
            if state.get(key) is not None:
                yield GaugeMetricFamily(name, about, value=state[key])
        reported = GaugeMetricFamily(
            "fleet_metric", "A value that the script reported by name.", labels=["name"]
        )
        for name, value in state["metrics"].items():
            if value is not None:
                reported.add_metric([name], value)
        if reported.samples:
            yield reported
        tables = [table for table in state["tables"] if "lookedUp" in table]
        for key, (name, kind, about) in TABLES.items() if tables else ():
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            metric = family(name, about, labels=["table"])
            for table in tables:
                metric.add_metric([table["name"]], table[key])
            yield metric
        for name, value in state["counters"].items():
            about = f"Counted by the runtime: {name.replace('_', ' ')}."
            yield CounterMetricFamily(f"fleet_{name}", about, value=value)


def prometheus_text(state: Mapping[str, Any], environ: Mapping[str, str]) -> bytes:
    """Render a snapshot in the Prometheus text format.

    Parameters
    ----------
    state : mapping
        The result of `fleet.process.progress.snapshot`.
    environ : mapping of str to str
        The process environment; the job name and attempt become labels of ``fleet_replica_info``.
    """
    # Imported at the first scrape, not in every process of a job, because the import takes a tenth of a
    # second.
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(state, environ))
    return generate_latest(registry)


class _Handler(BaseHTTPRequestHandler):
    """Handles requests for the server's four paths, and drops clients that stall."""

    timeout = REQUEST_TIMEOUT_SECONDS
    server_version = "fleet"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/progress":
            self._answer(200, "application/json", json.dumps(progress.snapshot()).encode())
        elif path == "/metrics":
            text = prometheus_text(progress.snapshot(), os.environ)
            self._answer(200, "text/plain; version=0.0.4", text)
        elif path == "/healthz":
            self._answer(200, "text/plain", b"ok\n")
        elif path == "/readyz":
            serving = progress.is_serving()
            self._answer(200 if serving else 503, "text/plain", b"ok\n" if serving else b"not serving\n")
        else:
            known = b"not found; there are /progress, /metrics, /healthz and /readyz\n"
            self._answer(404, "text/plain", known)

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is http.server's)
        _log.debug(format, *args)


class _Server(ThreadingHTTPServer):
    """An HTTP server that binds its own socket, because the base class looks up the host name in DNS.

    Parameters
    ----------
    host : str
        The address to bind; empty for every interface.
    port : int
        The port; 0 lets the system choose.

    Raises
    ------
    OSError
        The address cannot be bound.
    """

    daemon_threads = True
    # Otherwise server_close() would wait for the threads of stalled clients.
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
        """Handle a request within limits on time and concurrency, because any host may connect."""
        with self._readers.bounded(request):
            super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log the failure of a client at debug level instead of printing a traceback."""
        _log.debug("a client of the progress server at %s failed", client_address, exc_info=True)


_server: _Server | None = None


def start_server(host: str, port: int) -> tuple[str, int]:
    """Serve progress over HTTP from a daemon thread.

    Parameters
    ----------
    host
        The address to bind; the empty string means every interface.
    port
        The port; 0 lets the system choose.

    Returns
    -------
    tuple of str and int
        The bound address and port. Later calls change nothing, and return the address and port of the first.

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
    """Stop the server; progress remains readable within this process."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.shutdown()
        server.server_close()


def _close_in_child() -> None:
    """Close a forked child's copy of the listening socket, which the parent continues to use."""
    global _server
    if _server is not None:
        _server.socket.close()
    _server = None


os.register_at_fork(after_in_child=_close_in_child)
