"""A trainer's calls to the control service of one server."""

from collections.abc import Iterator, Mapping
from typing import Final

import grpc

from fleet.errors import ConfigurationError, FleetError, PeerLostError, RemoteProtocolError
from fleet.parameter_server.proto import control_pb2, control_pb2_grpc

__all__ = ["CHANNEL_OPTIONS", "ControlClient"]

CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
_REFUSALS: Final = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS}
)


class ControlClient:
    """The control channel from one trainer to one server.

    Parameters
    ----------
    endpoint : str
        ``host:port`` of the server.
    trainer, attempt : int
        Who calls.
    """

    def __init__(self, endpoint: str, trainer: int, attempt: int) -> None:
        self.endpoint = endpoint
        self._trainer = control_pb2.Trainer(id=trainer, attempt=attempt)
        self._channel = grpc.insecure_channel(endpoint, options=list(CHANNEL_OPTIONS))
        self._stub = control_pb2_grpc.ParameterServerStub(self._channel)

    def join(
        self,
        job_name: str,
        job_uid: str,
        agreement: Mapping[str, str],
        checksums: Mapping[int, int],
        timeout_seconds: float,
    ) -> control_pb2.JoinReply:
        """Ask to be admitted.

        Raises
        ------
        ConfigurationError
            The server refuses, with its reason.
        PeerLostError
            There was no answer in time.
        """
        request = control_pb2.JoinRequest(
            job_name=job_name,
            job_uid=job_uid,
            trainer=self._trainer,
            agreement=dict(agreement),
            checksums=dict(checksums),
        )
        try:
            return self._stub.Join(request, timeout=timeout_seconds, wait_for_ready=True)
        except grpc.RpcError as error:
            raise self._error(error) from error

    def heartbeat(self, timeout_seconds: float) -> "grpc.Future[control_pb2.HeartbeatReply]":
        """Send a sign of life; the reply comes as a future, so that many servers are called at once."""
        return self._stub.Heartbeat.future(
            control_pb2.HeartbeatRequest(trainer=self._trainer), timeout=timeout_seconds
        )

    def barrier(self, passed: int, timeout_seconds: float) -> control_pb2.BarrierReply:
        """Arrive at the barrier that follows `passed` others, or ask again whether it is passed."""
        request = control_pb2.BarrierRequest(trainer=self._trainer, passed=passed)
        try:
            return self._stub.Barrier(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._error(error) from error

    def state(self, timeout_seconds: float) -> Iterator[control_pb2.StatePiece]:
        """Iterate over the server's optimizer state."""
        try:
            yield from self._stub.State(control_pb2.StateRequest(), timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _error(self, error: grpc.RpcError) -> FleetError:
        code, details = error.code(), error.details()
        if code in _REFUSALS:
            return ConfigurationError(f"parameter server {self.endpoint} refused: {details}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ConfigurationError(
                f"{self.endpoint} answers, but is no fleet parameter server ({details}); check the endpoints"
            )
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return PeerLostError(f"parameter server {self.endpoint} does not answer: {details}")
        return RemoteProtocolError(
            f"parameter server {self.endpoint} failed a call with {code.name}: {details}"
        )
