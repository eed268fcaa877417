"""The gRPC control service of a parameter server, on the endpoint's port, with gRPC's health service."""

import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import grpc
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.control.calls import answer, cancel_if_unread
from fleet.parameter_server.control.channel import server_credentials
from fleet.parameter_server.control.checkpoints import CheckpointServicer, pieces_of_state, pieces_of_tensor
from fleet.parameter_server.control.front import LOOPBACK, Front
from fleet.parameter_server.control.guard import Guard
from fleet.parameter_server.control.proto import control_pb2, control_pb2_grpc
from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.transport.sockets import listen
from fleet.plan.placement import Placement
from fleet.process import progress
from fleet.process.connections import MAX_HALF_OPEN

if TYPE_CHECKING:
    from fleet.parameter_server.server.barriers import Barriers
    from fleet.parameter_server.server.shard_checkpointer import ShardCheckpointer

__all__ = ["ControlBackend", "ControlService", "pack_placement"]

_STOP_SECONDS: Final = 1.0
_STALLED_SECONDS: Final = 180.0
_MOST_BYTES: Final = 256 << 20
_LARGE: Final = frozenset({"Status", "Commit", "Write", "Reduce"})
"""Methods whose messages carry tensors from a trainer, or the names of all tensors of a model."""


class ControlBackend(Protocol):
    """The server's methods that the control service calls. Thread-safe."""

    checkpoints: "ShardCheckpointer"
    """The handler of checkpoint calls."""
    barriers: "Barriers"
    """Barriers and reductions of the trainers."""

    def join(self, request: control_pb2.JoinRequest) -> control_pb2.JoinReply:
        """Admit a trainer; raise ConfigurationError to reject it."""

    def completed_trainers(self, request: control_pb2.CompletedRequest) -> tuple[int, ...]:
        """Return the trainers that have completed; raise ConfigurationError to reject the call."""

    def heartbeat(self, trainer: int, attempt: int) -> control_pb2.HeartbeatReply:
        """Record a heartbeat and return the reply."""

    def stats(self) -> control_pb2.StatsReply:
        """Return the server's progress and traffic statistics."""

    def norm(self, request: control_pb2.NormRequest) -> None:
        """Add another server's part of a norm; raise ConfigurationError to reject it."""

    def optimizer_state(self) -> Iterator[tuple[int, Mapping[str, object]]]:
        """Yield each block's optimizer state."""

    def values(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each block's value."""


class ControlService:
    """The gRPC service of one parameter server.

    Parameters
    ----------
    address : str
        The address to bind; see `bind_address`.
    port : int
    backend : ControlBackend
    num_trainers : int
        The number of trainers, which determines how many calls are served concurrently.
    key : bytes
        The key of the job, which callers must prove that they have; empty if the job has none.
    server : int
        The index of this server in the job.
    most_bytes : int
        The size of the largest message.
    stalled_seconds : float
        The longest time for which a receiver of the server's state may leave a piece unread.
    certificates : Certificates, optional
        The certificates for TLS; callers must have certificates issued by the same authority.
    """

    def __init__(
        self,
        address: str,
        port: int,
        backend: ControlBackend,
        num_trainers: int,
        *,
        key: bytes = b"",
        server: int = 0,
        most_bytes: int = _MOST_BYTES,
        stalled_seconds: float = _STALLED_SECONDS,
        certificates: Certificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._address = address
        self._port = port
        self._front: Front | None = None
        self._most_unproved = MAX_HALF_OPEN + num_trainers if key else None
        self._serving = False
        self._pools = {
            "Check": futures.ThreadPoolExecutor(2, thread_name_prefix="fleet-refuse"),
            "Heartbeat": futures.ThreadPoolExecutor(2, thread_name_prefix="fleet-signs"),
            # A stream occupies its thread until the receiver has read it.
            "State": futures.ThreadPoolExecutor(num_trainers, thread_name_prefix="fleet-state"),
        }
        guard = Guard(key, server, self._pools, _LARGE, lambda: self._serving, self._proved)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(2 * num_trainers + 4, thread_name_prefix="fleet-control"),
            interceptors=[guard],
            options=[
                (
                    "grpc.so_reuseport",
                    0,
                ),  # otherwise a second server could bind the port, and receive half of the calls
                ("grpc.max_receive_message_length", most_bytes),
                ("grpc.max_send_message_length", -1),
            ],
        )
        servicer = _Servicer(backend, stalled_seconds)
        control_pb2_grpc.add_ParameterServerServicer_to_server(servicer, self._server)

    def start(self) -> None:
        """Start accepting calls and answering probes.

        Raises
        ------
        ConfigurationError
            The address cannot be bound.
        """
        host = f"[{self._address or '::'}]" if ":" in (self._address or "::") else self._address
        name = f"{host}:{self._port}"
        try:
            if self._most_unproved is None:
                self._bind(name)
            else:
                listener = listen(self._address, self._port)
                inner = self._bind(f"{LOOPBACK}:0")
                self._front = Front(listener, inner, self._most_unproved)
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(
                f"the parameter server cannot listen on {name}: {error}; check that no other process uses "
                "the port, and that the address is one of this host's"
            ) from error
        self._server.start()
        self._set_serving(True)

    def _bind(self, address: str) -> int:
        """Bind gRPC's port and return it; raise RuntimeError if gRPC cannot listen."""
        if self._certificates is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, server_credentials(self._certificates))
        if not port:
            raise RuntimeError("no such address here")
        return port

    def _proved(self, peer: str) -> None:
        if self._front is not None:
            self._front.proved(peer)

    def refuse(self) -> threading.Event:
        """Stop accepting calls; return an event that is set when the calls in progress have ended."""
        self._set_serving(False)
        if self._front is not None:
            self._front.close()
        return self._server.stop(_STOP_SECONDS)

    def _set_serving(self, serving: bool) -> None:
        self._serving = serving
        progress.serves(serving)

    def stop(self) -> None:
        """Stop the service; calls in progress have one second to end."""
        self.refuse().wait()
        for pool in self._pools.values():
            pool.shutdown(wait=False)


class _Servicer(CheckpointServicer):
    """The handlers for all control calls; the base class handles the checkpoint calls."""

    def __init__(self, backend: ControlBackend, stalled_seconds: float) -> None:
        super().__init__(backend.checkpoints)
        self._backend = backend
        self._stalled_seconds = stalled_seconds

    def Join(  # noqa: N802 - the service's name
        self, request: control_pb2.JoinRequest, context: grpc.ServicerContext
    ) -> control_pb2.JoinReply:
        return answer(context, lambda: self._backend.join(request))

    def Completed(  # noqa: N802 - the service's name
        self, request: control_pb2.CompletedRequest, context: grpc.ServicerContext
    ) -> control_pb2.CompletedReply:
        trainers = answer(context, lambda: self._backend.completed_trainers(request))
        return control_pb2.CompletedReply(trainers=trainers)

    def Heartbeat(  # noqa: N802 - the service's name
        self,
        request: control_pb2.HeartbeatRequest,
        context: grpc.ServicerContext,  # noqa: ARG002 - gRPC's signature
    ) -> control_pb2.HeartbeatReply:
        return self._backend.heartbeat(request.trainer.id, request.trainer.attempt)

    def Barrier(  # noqa: N802 - the service's name
        self, request: control_pb2.BarrierRequest, context: grpc.ServicerContext
    ) -> control_pb2.BarrierReply:
        trainer, barriers = request.trainer, self._backend.barriers
        if request.ending:
            return answer(context, lambda: barriers.end(trainer.id, trainer.attempt))
        return answer(context, lambda: barriers.barrier(trainer.id, trainer.attempt, request.passed))

    def Stats(  # noqa: N802 - the service's name
        self,
        request: control_pb2.StatsRequest,  # noqa: ARG002 - gRPC's signature
        context: grpc.ServicerContext,  # noqa: ARG002 - gRPC's signature
    ) -> control_pb2.StatsReply:
        return self._backend.stats()

    def Norm(  # noqa: N802 - the service's name
        self, request: control_pb2.NormRequest, context: grpc.ServicerContext
    ) -> control_pb2.NormReply:
        answer(context, lambda: self._backend.norm(request))
        return control_pb2.NormReply()

    def State(  # noqa: N802 - the service's name
        self,
        request: control_pb2.StateRequest,
        context: grpc.ServicerContext,
    ) -> Iterator[control_pb2.StatePiece]:
        yield from cancel_if_unread(self._pieces(request, context), context.cancel, self._stalled_seconds)

    def _pieces(
        self, request: control_pb2.StateRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.StatePiece]:
        if request.values:
            for block, value in self._backend.values():
                yield from pieces_of_tensor(block, "", value)
            return
        for block, state in self._backend.optimizer_state():
            yield from answer(context, partial(pieces_of_state, block, state))

    def Reduce(  # noqa: N802 - the service's name
        self, request: control_pb2.ReduceRequest, context: grpc.ServicerContext
    ) -> control_pb2.ReduceReply:
        given = Contribution(request.operation, request.dtype, tuple(request.shape), request.data)
        trainer = request.trainer
        return answer(
            context, lambda: self._backend.barriers.reduce(trainer.id, trainer.attempt, request.passed, given)
        )


def pack_placement(placement: Placement, checksums: Mapping[int, int]) -> control_pb2.Placement:
    """Encode the placement of a server's blocks.

    Parameters
    ----------
    placement : Placement
    checksums : mapping of int to int
        CRC-32 of the initial values in the server's process, by block.
    """
    parts = [
        control_pb2.Part(
            block=part.block,
            name=part.name,
            index=part.index,
            param=part.param,
            dtype=part.dtype,
            begin=part.begin,
            shape=part.shape,
            checksum=checksums[part.block],
        )
        for part in placement.parts
    ]
    return control_pb2.Placement(version=placement.version, parts=parts)
