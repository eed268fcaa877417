"""How an error gets from a server to who has called it: as a status of gRPC, and back."""

from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

import grpc

from fleet.errors import (
    AlreadyJoinedError,
    ConfigurationError,
    DiskFullError,
    FleetError,
    PeerLostError,
    RemoteProtocolError,
    disk_error,
)

__all__ = ["answer", "error_of", "refuse"]

Answered = TypeVar("Answered")

_REFUSALS: Final = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS}
)


def answer(context: grpc.ServicerContext, call: Callable[[], Answered]) -> Answered:
    """Return what a call returns; refuse with its error."""
    try:
        return call()
    except FleetError as error:
        refuse(context, error)
    except OSError as error:
        refuse(context, disk_error(error, str(error)))


def refuse(context: grpc.ServicerContext, error: FleetError) -> NoReturn:
    """End a call with an error, which `error_of` makes of the status again."""
    code = grpc.StatusCode.ABORTED  # it failed here, and what was asked for is no mistake
    if isinstance(error, PeerLostError):
        code = grpc.StatusCode.OUT_OF_RANGE  # UNAVAILABLE would be asked again
    elif isinstance(error, DiskFullError):
        code = (
            grpc.StatusCode.DATA_LOSS
        )  # RESOURCE_EXHAUSTED is gRPC's own word for messages that are too large
    elif isinstance(error, ConfigurationError):
        taken = isinstance(error, AlreadyJoinedError)
        code = grpc.StatusCode.ALREADY_EXISTS if taken else grpc.StatusCode.FAILED_PRECONDITION
    context.abort(code, str(error))


def error_of(endpoint: str, error: grpc.RpcError) -> FleetError:
    """Return what the call of a parameter server has ended with, by its address."""
    code, details = error.code(), error.details()
    if code in _REFUSALS:
        return ConfigurationError(f"parameter server {endpoint} refused: {details}")
    if code is grpc.StatusCode.OUT_OF_RANGE:
        return PeerLostError(f"parameter server {endpoint}: {details}")
    if code is grpc.StatusCode.DATA_LOSS:
        return DiskFullError(f"parameter server {endpoint}: {details}")
    if code is grpc.StatusCode.ABORTED:
        return FleetError(f"parameter server {endpoint}: {details}")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return ConfigurationError(
            f"parameter server {endpoint} does not take this process for one of its job: give all "
            "the same FLEET_JOB_KEY, and hosts whose clocks agree"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigurationError(
            f"{endpoint} answers, but is no fleet parameter server ({details}); check the endpoints"
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return PeerLostError(f"parameter server {endpoint} does not answer: {details}")
    return RemoteProtocolError(f"parameter server {endpoint} failed a call with {code.name}: {details}")
