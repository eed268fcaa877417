"""What the environment and the strategy may tune about the runtime.

Checked at ``fleet.init``, and read when a session or a server starts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from fleet.environment.deadlines import Deadlines, count, positive

__all__ = ["THREAD_NUMS", "Settings"]

THREAD_NUMS: Final = ("FLAGS_rpc_send_thread_num", "FLAGS_rpc_get_thread_num")
"""Upper bounds, which change nothing: one thread sends to each server and one receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds(Deadlines):
    """How much a trainer has under way."""

    send_queue_size: int = 2
    """Half-async: how many gradients of one block may be under way before a step waits."""
    max_merge_var_num: int = 20
    """Half-async: how many of them are merged at most."""
    look_ups_at_once: int = 12
    """How many look-ups of rows may be unanswered by one server, as far as it allows."""


@dataclass(frozen=True, slots=True)
class Settings(_Bounds):
    """The deadlines of the job, and what else may be tuned."""

    socket_buffer_bytes: int | None = None
    """Size of the data connections' kernel buffers; None lets the kernel tune them."""
    piece_bytes: int | None = None
    """How large the pieces are in which a server's blocks travel; None: see `pieces.in_pieces`."""
    retry_times: int = 3
    """How often a call or a connection that failed is tried again, while the peer seems to live."""
    transport: str = "auto"
    """How tensors travel; see `DistributedStrategy`. The strategy says it, not the environment."""
    max_trainers: int | None = None
    """How many trainers an elastic job may come to have; None where their number is fixed."""
    checkpoint_dir: str = ""
    """The one folder below which servers write and remove files; empty: wherever they are asked to."""
    tls_dir: str = ""
    """Where the certificates are with which replicas encrypt what they say; empty: they do not."""
    tls_server_name: str = ""
    """The name that servers' certificates have; empty: each has that of its host."""
    wire_dtype: str = ""
    """In which dtype, where in another than their own. The strategy says it."""
    fused: bool = False
    """Whether servers step with fused kernels. The strategy says it."""

    @property
    def glance_seconds(self) -> float:
        """What passes at most between two looks of a watcher that runs: two beats, or one call in vain."""
        return min(2 * self.heartbeat_seconds + 1.0, self.deadline_seconds / 2)

    @property
    def agreement(self) -> Mapping[str, str]:
        """What of this all processes must have in common, by name."""
        return {"wire_dtype": self.wire_dtype} if self.wire_dtype else {}

    @property
    def stalled_seconds(self) -> float:
        """How long a peer that is alive may keep the others waiting.

        It may wait itself, for one that has not started yet.
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
