"""The settings of a job's processes, from the environment and the strategy.

``fleet.init`` validates them. They are read when a session or a server starts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from fleet.environment.deadlines import Deadlines, count, positive

__all__ = ["THREAD_NUMS", "Settings"]

THREAD_NUMS: Final = ("FLAGS_rpc_send_thread_num", "FLAGS_rpc_get_thread_num")
"""Paddle's thread counts, which have no effect: one thread serves all connections of a trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds(Deadlines):
    """Limits on a trainer's data in flight."""

    send_queue_size: int = 2
    """Half-async: the maximum number of gradients of one block that may be in flight before a step waits."""
    max_merge_var_num: int = 20
    """Half-async: the largest number of gradients that are merged into one."""
    look_ups_at_once: int = 12
    """The maximum number of unanswered row requests to one server; the server has its own limit, too."""


@dataclass(frozen=True, slots=True)
class Settings(_Bounds):
    """All settings of a process, including the job's deadlines."""

    socket_buffer_bytes: int | None = None
    """The size of the socket buffers of data connections; None lets the kernel tune them."""
    piece_bytes: int | None = None
    """The maximum size of the pieces of a block; None selects the default of `pieces.in_pieces`."""
    retry_times: int = 3
    """The number of retries of a failed call or connection while the peer appears to be alive."""
    transport: str = "auto"
    """How gradients and values are sent: ``auto``, ``tcp`` or ``shared_memory``. From the strategy."""
    max_trainers: int | None = None
    """The maximum number of trainers of an elastic job; None if the number is fixed."""
    checkpoint_dir: str = ""
    """The only folder in which servers write and remove files; empty for no restriction."""
    tls_dir: str = ""
    """The folder with the certificates for TLS between replicas; empty for no encryption."""
    tls_server_name: str = ""
    """The name in the servers' certificates; empty if each certificate has its server's host name."""
    wire_dtype: str = ""
    """The dtype of tensors on the wire; empty for their own dtype. From the strategy."""
    fused: bool = False
    """Whether servers step with fused kernels. From the strategy."""

    @property
    def glance_seconds(self) -> float:
        """The longest time, in seconds, that a `WatchClock` counts between two checks of a watchdog."""
        return min(2 * self.heartbeat_seconds + 1.0, self.deadline_seconds / 2)

    @property
    def agreement(self) -> Mapping[str, str]:
        """The settings that must be equal in all processes, by name."""
        return {"wire_dtype": self.wire_dtype} if self.wire_dtype else {}

    @property
    def stalled_seconds(self) -> float:
        """The longest time, in seconds, for which a live peer may keep other processes waiting.

        It is long because the peer may itself be waiting for another peer that has not started yet.
        """
        return max(10 * self.deadline_seconds, self.starting_seconds)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Settings":
        """Read the settings from the environment.

        The variables are those of `Deadlines`, ``FLAGS_rpc_retry_times``, ``FLEET_SOCKET_BUFFER_BYTES``,
        ``FLEET_PIECE_BYTES``, ``FLEET_MAX_TRAINERS``, ``FLEET_CHECKPOINT_DIR``, ``FLEET_TLS_DIR``,
        ``FLEET_TLS_SERVER_NAME``, ``FLAGS_communicator_send_queue_size``,
        ``FLAGS_communicator_max_merge_var_num`` and ``FLAGS_rpc_prefetch_thread_num``. The values of
        ``FLAGS_rpc_{send,get}_thread_num`` are only validated.

        Raises
        ------
        ConfigurationError
            A value is not a positive number, or a count is not a whole number; the message names the
            variable.
        """
        for name in THREAD_NUMS:
            count(environ, name, 1)
        buffer_bytes = environ.get("FLEET_SOCKET_BUFFER_BYTES")
        return cls(
            **asdict(Deadlines.from_environ(environ)),
            socket_buffer_bytes=int(positive(environ, "FLEET_SOCKET_BUFFER_BYTES", 0))
            if buffer_bytes
            else None,
            piece_bytes=count(environ, "FLEET_PIECE_BYTES", 0) or None,
            send_queue_size=count(environ, "FLAGS_communicator_send_queue_size", 2),
            max_merge_var_num=count(environ, "FLAGS_communicator_max_merge_var_num", 20),
            look_ups_at_once=count(environ, "FLAGS_rpc_prefetch_thread_num", 12),
            retry_times=0
            if environ.get("FLAGS_rpc_retry_times") == "0"
            else count(environ, "FLAGS_rpc_retry_times", 3),
            checkpoint_dir=environ.get("FLEET_CHECKPOINT_DIR", "").strip(),
            max_trainers=count(environ, "FLEET_MAX_TRAINERS", 0) or None,
            tls_dir=environ.get("FLEET_TLS_DIR", "").strip(),
            tls_server_name=environ.get("FLEET_TLS_SERVER_NAME", "").strip(),
        )
