"""Any bytes on the data port, and in the messages of every call: refused, and the training goes on.

The bytes are the same in each run. Those that follow a proof of the job's key stand for what is broken, or of
another version, on a replica's side.
"""

from __future__ import annotations

import itertools
import socket
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.parameter_server.control.channel import open_channel
from fleet.parameter_server.control.guard import prover_of
from fleet.parameter_server.control.proto import control_pb2
from fleet.wire import Header, Hello, Kind, Side, job_hash, pack_header
from fleet.wire.messages import pack_hello
from fleet.wire.proof import CHALLENGE_BYTES, MAC_BYTES, greeting_mac
from tests.support.parameter_server import HOST, PATIENT, Loopback, loopback
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = b"k" * 32
SERVICE = control_pb2.DESCRIPTOR.services_by_name["ParameterServer"]
ATTEMPTS = itertools.count(1)
HELLO = pack_hello(Hello("", 0, "fuzz"))
GREETING = (
    pack_header(Header(Kind.HELLO, job_hash("loopback", "uid-1"), 0, 0, payload_bytes=len(HELLO))) + HELLO
)
FIXED = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def job() -> Iterator[Loopback]:
    """Give a server that outlives every test of this module."""
    with loopback(key=KEY, settings=PATIENT) as running:
        yield running


@pytest.fixture(autouse=True)
def _training_goes_on(job: Loopback) -> Iterator[None]:
    before = threading.active_count()
    yield
    trainer, model, _ = job.make_trainer(attempt=next(ATTEMPTS))
    trainer.start()
    model(torch.ones(1, 20)).sum().backward()
    trainer.step()
    trainer.close()
    assert job.servers[0].failure is None
    wait_for(lambda: threading.active_count() <= before + 16, "the end of the threads of refused connections")


def send_until_closed(job: Loopback, payload: bytes, *, proves: bool) -> None:
    """Send bytes to the data port; fail unless the server closes the connection in time."""
    ports = job.servers[0].server._ports
    assert ports is not None
    with socket.create_connection((HOST, ports.port), timeout=20) as connected:
        try:
            if proves:
                challenge, answer = (
                    connected.recv(CHALLENGE_BYTES, socket.MSG_WAITALL),
                    bytes(CHALLENGE_BYTES),
                )
                connected.sendall(answer + greeting_mac(KEY, Side.TRAINER, challenge, answer))
                connected.recv(MAC_BYTES, socket.MSG_WAITALL)
            connected.sendall(payload)
            connected.shutdown(socket.SHUT_WR)
            while connected.recv(1 << 16):
                pass
        except ConnectionError:
            pass  # it was closed with bytes unread


@pytest.mark.parametrize("proves", [False, True], ids=["a-stranger", "a-replica"])
@FIXED
@given(payload=st.binary(max_size=300))
def test_any_bytes_for_a_greeting(job, proves, payload):
    send_until_closed(job, payload, proves=proves)


@FIXED
@given(data=st.data())
def test_a_greeting_with_bytes_changed(job, data):
    greeting = bytearray(GREETING)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(greeting) - 1))
        greeting[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    send_until_closed(job, bytes(greeting), proves=True)


@pytest.mark.parametrize("method", sorted(each.name for each in SERVICE.methods))
@FIXED
@given(message=st.binary(max_size=120))
def test_any_bytes_for_a_message(job, method, message):
    with open_channel(job.endpoints[0], prover_of(KEY, 0)) as channel:
        call: Any = (channel.unary_stream if method == "State" else channel.unary_unary)(
            f"/{SERVICE.full_name}/{method}"
        )
        try:
            answer = call(message, timeout=20)
            _ = list(answer) if method == "State" else answer
        except grpc.RpcError as error:
            status: Any = error
            assert status.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, message
