"""Replies of servers that are on their way."""

from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from fleet.errors import FleetError

__all__ = ["Pending"]

Reply = TypeVar("Reply")


class Pending(Generic[Reply]):
    """A reply that is on its way, so that many servers work at once.

    Parameters
    ----------
    future : grpc.Future
    describe : callable
        Makes our error of gRPC's.
    """

    def __init__(self, future: "grpc.Future[Reply]", describe: Callable[[grpc.RpcError], FleetError]) -> None:
        self._future = future
        self._describe = describe

    def arrives_within(self, seconds: float) -> bool:
        """Wait a while for the reply; return whether it is there, be it an error."""
        try:
            self._future.exception(timeout=seconds)
        except grpc.FutureTimeoutError:
            return False
        return True

    def result(self) -> Reply:
        """Wait for the reply.

        Raises
        ------
        ConfigurationError
            The server refuses, with its reason.
        FleetError
            It failed, with its reason.
        PeerLostError
            There was no answer in time.
        """
        try:
            return self._future.result()
        except grpc.RpcError as error:
            raise self._describe(error) from error
