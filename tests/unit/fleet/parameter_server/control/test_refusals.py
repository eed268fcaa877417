"""An error of a server arrives as what it was, with the server's name."""

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from fleet.errors import AlreadyJoinedError, ConfigurationError, DiskFullError, FleetError, PeerLostError
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.control.proto import control_pb2, control_pb2_grpc
from fleet.parameter_server.control.refusals import answer


class Refusing(control_pb2_grpc.ParameterServerServicer):
    """Answers no barrier but with an error."""

    error: Exception

    def Barrier(  # noqa: N802 - the service's name
        self, request: control_pb2.BarrierRequest, context: grpc.ServicerContext
    ) -> control_pb2.BarrierReply:
        def refused() -> control_pb2.BarrierReply:
            raise self.error

        return answer(context, refused)


@pytest.fixture
def refusing() -> Iterator[tuple[Refusing, ControlClient]]:
    servicer = Refusing()  # type: ignore[abstract]
    server = grpc.server(futures.ThreadPoolExecutor(1))
    control_pb2_grpc.add_ParameterServerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = ControlClient(f"127.0.0.1:{port}", 0, 0)
    yield servicer, client
    client.close()
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("error", "arrives", "words"),
    [
        (ConfigurationError("another model"), ConfigurationError, " refused: another model"),
        (AlreadyJoinedError("it lives"), ConfigurationError, " refused: it lives"),
        (PeerLostError("all have left"), PeerLostError, ": all have left"),
        (DiskFullError("no room"), DiskFullError, ": no room"),
        (FleetError("it failed"), FleetError, ": it failed"),
        (OSError("the disk is gone"), FleetError, ": the disk is gone"),
    ],
)
def test_an_error_arrives_as_what_it_was(refusing, error, arrives, words):
    servicer, client = refusing
    servicer.error = error
    with pytest.raises(FleetError) as raised:
        client.barrier(0, 10.0)
    assert type(raised.value) is arrives
    assert str(raised.value) == f"parameter server {client.endpoint}{words}"


def test_what_is_no_parameter_server_is_named():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = ControlClient(f"127.0.0.1:{port}", 0, 0)
    with pytest.raises(ConfigurationError, match="answers, but is no fleet parameter server"):
        client.barrier(0, 10.0)
    client.close()
    server.stop(0).wait()
