"""Settings of the runtime, from the environment and the strategy.

They are checked in ``fleet.init``, and read when a session or a server starts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from fleet.environment.deadlines import Deadlines, count, positive

__all__ = ["THREAD_NUMS", "Settings"]

THREAD_NUMS: Final = ("FLAGS_rpc_send_thread_num", "FLAGS_rpc_get_thread_num")
"""Upper bounds without effect: one thread sends to each server, and one receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds(Deadlines):
    """Bounds of what a trainer has in flight."""

    send_queue_size: int = 2
    """Half-async: the gradients of one block that may be in flight before a step waits."""
    max_merge_var_num: int = 20
    """Half-async: the most of them that are merged."""
    look_ups_at_once: int = 12
    """The most requests for rows that one server may have to answer, within its own bound."""


@dataclass(frozen=True, slots=True)
class Settings(_Bounds):
    """The deadlines of the job, and everything else that may be tuned."""

    socket_buffer_bytes: int | None = None
    """Size of the data connections' kernel buffers; None lets the kernel tune them."""
    piece_bytes: int | None = None
    """The size of the pieces in which a server's blocks travel; None: see `pieces.in_pieces`."""
    retry_times: int = 3
    """How often a failed call or connection is tried again while the peer seems to live."""
    transport: str = "auto"
    """How tensors travel; see `DistributedStrategy`. From the strategy, not the environment."""
    max_trainers: int | None = None
    """The most trainers of an elastic job; None where their number is fixed."""
    checkpoint_dir: str = ""
    """The folder in which servers write and remove files; empty: in any folder."""
    tls_dir: str = ""
    """The folder of the certificates for TLS between replicas; empty: no encryption."""
    tls_server_name: str = ""
    """The name in the certificates of servers; empty: the name of each server's host."""
    wire_dtype: str = ""
    """The dtype in which tensors travel; empty: their own. From the strategy."""
    fused: bool = False
    """Whether servers step with fused kernels. From the strategy."""

    @property
    def glance_seconds(self) -> float:
        """The longest time between two checks of a running watcher: two beats, or one failed call."""
        return min(2 * self.heartbeat_seconds + 1.0, self.deadline_seconds / 2)

    @property
    def agreement(self) -> Mapping[str, str]:
        """The settings that all processes must have in common, by name."""
        return {"wire_dtype": self.wire_dtype} if self.wire_dtype else {}

    @property
    def stalled_seconds(self) -> float:
        """How long a live peer may keep others waiting.

        It may itself wait for a peer that has not started yet.
        """
        return max(10 * self.deadline_seconds, self.starting_seconds)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Settings":
        """Read the settings.

        Those of `Deadlines`, ``FLAGS_rpc_retry_times``, ``FLEET_SOCKET_BUFFER_BYTES``, ``FLEET_PIECE_BYTES``,
        ``FLEET_MAX_TRAINERS``, ``FLEET_CHECKPOINT_DIR``, ``FLEET_TLS_DIR``, ``FLEET_TLS_SERVER_NAME``,
        ``FLAGS_communicator_send_queue_size``, ``FLAGS_communicator_max_merge_var_num`` and
        ``FLAGS_rpc_prefetch_thread_num``; ``FLAGS_rpc_{send,get}_thread_num`` are checked.

        Raises
        ------
        ConfigurationError
            A value is no positive number, or a count no whole one; the message names the variable.
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
