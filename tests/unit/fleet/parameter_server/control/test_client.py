"""Unanswered calls are retried, and a placement arrives as it was sent."""

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from fleet.errors import PeerLostError
from fleet.parameter_server.control.client import ControlClient, read_placement
from fleet.parameter_server.control.proto import control_pb2, control_pb2_grpc
from fleet.parameter_server.control.service import pack_placement
from fleet.plan.placement import Part, Placement


class Unavailable(control_pb2_grpc.ParameterServerServicer):
    """Answers barriers, but not the first ones."""

    def __init__(self) -> None:
        self.failures = 0
        self.calls = 0

    def Barrier(  # noqa: N802 - the service's name
        self,
        request: control_pb2.BarrierRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.BarrierReply:
        self.calls += 1
        if self.calls <= self.failures:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return control_pb2.BarrierReply(passed=True)


@pytest.fixture
def service() -> Iterator[Unavailable]:
    servicer = Unavailable()  # type: ignore[abstract]
    server = grpc.server(futures.ThreadPoolExecutor(1))
    control_pb2_grpc.add_ParameterServerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    servicer.endpoint = f"127.0.0.1:{port}"  # type: ignore[attr-defined]
    yield servicer
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("retry_times", "failures", "calls"),
    [
        pytest.param(2, 2, 3, id="the-last-try-succeeds"),
        pytest.param(1, 2, 2, id="one-try-too-few"),
        pytest.param(0, 1, 1, id="never-again"),
    ],
)
def test_a_call_that_finds_nobody_is_made_again(service, retry_times, failures, calls):
    service.failures = failures
    client = ControlClient(service.endpoint, 0, 0, retry_times)
    try:
        if calls > failures:
            assert client.barrier(0, 10.0).passed
        else:
            with pytest.raises(PeerLostError, match=f"{service.endpoint} does not answer: not now"):
                client.barrier(0, 10.0)
    finally:
        client.close()
    assert service.calls == calls


def test_a_placement_is_read_as_it_was_told():
    parts = (
        Part(3, "w.block1", 1, "w", "float32", 20000, (200, 100)),
        Part(0, "scale", 0, "scale", "float64", 0, ()),
    )
    placement = Placement(parts, 7)
    message = pack_placement(placement, {0: 1, 3: 0xFFFFFFFF})
    heard = control_pb2.Placement.FromString(message.SerializeToString())
    assert read_placement(heard) == placement
    assert [part.checksum for part in heard.parts] == [0xFFFFFFFF, 1]
