"""A server meets broken peers on its data port: each gets a clear error, and the server stays up."""

import copy
import itertools
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from fleet.errors import FleetError
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.modes import Async
from fleet.parameter_server.transport.sockets import receive_exactly
from fleet.wire import HEADER_BYTES, Header, Kind, job_hash, pack_header, read_header
from fleet.wire.messages import Hello as Greeting
from fleet.wire.messages import pack_hello, pack_hyper, read_error, read_hello
from fleet.wire.protocol import VERSION
from tests.support.parameter_server import HOST, PATIENT, Loopback, loopback
from tests.support.processes import wait_for

JOB = job_hash("loopback", "uid-1")
ATTEMPTS = itertools.count()


class Peer:
    """Somebody who speaks to the data port of the first server, well or badly."""

    def __init__(self, job: Loopback, trainer: int = 0) -> None:
        self.job = job
        self.trainer = trainer
        self.attempt = next(ATTEMPTS)
        self.control = ControlClient(job.endpoints[0], trainer, self.attempt)
        plan = job.make_trainer()[0].plan
        self.blocks = plan.blocks
        self.reply = self.control.join("loopback", "uid-1", plan.agreement, 10.0, lambda: None)
        self.socket = socket.create_connection((HOST, self.reply.data_port), timeout=10)

    def send(self, kind: Kind, payload: bytes = b"", **fields: int) -> None:
        self.socket.sendall(self.frame(kind, payload, **fields))

    def frame(self, kind: Kind, payload: bytes = b"", **fields: int) -> bytes:
        values: dict[str, Any] = {"job": JOB, "attempt": self.attempt, "trainer": self.trainer}
        values |= {"payload_bytes": len(payload), **fields}
        return pack_header(Header(kind, **values)) + payload

    def greeting(self, session: str = "", taken: int = 0, **fields: int) -> bytes:
        hello = pack_hello(Greeting(self.reply.incarnation, len(self.blocks), session, taken))
        return self.frame(Kind.HELLO, hello, **fields)

    def greet(self) -> None:
        self.socket.sendall(self.greeting())
        assert self.receive()[0].kind is Kind.HELLO

    def pull(self) -> None:
        """Ask for the values of the step at which the server is."""
        self.send(Kind.PULL, step=self.job.servers[0].server.stats().step)

    def connect_again(self) -> None:
        self.socket.close()
        self.socket = socket.create_connection((HOST, self.reply.data_port), timeout=10)

    def receive(self) -> tuple[Header, bytes]:
        buffer = memoryview(bytearray(HEADER_BYTES))
        receive_exactly(self.socket, buffer)
        header = read_header(buffer)
        assert header is not None
        payload = memoryview(bytearray(header.payload_bytes))
        receive_exactly(self.socket, payload)
        return header, bytes(payload)

    def expect_error(self) -> FleetError:
        header, payload = self.receive()
        assert header.kind is Kind.ERROR
        assert self.socket.recv(1) == b""
        return read_error(payload)

    def close(self) -> None:
        self.socket.close()
        self.control.close()


@contextmanager
def peer_of(job: Loopback, trainer: int = 0) -> Iterator[Peer]:
    peer = Peer(job, trainer)
    try:
        yield peer
    finally:
        peer.close()


@pytest.fixture(scope="module")
def job() -> Iterator[Loopback]:
    """Give a server that outlives every test of this module."""
    with loopback(trainers=1, settings=PATIENT) as running:
        yield running


@pytest.fixture(autouse=True)
def _the_server_stays_up(job: Loopback) -> Iterator[None]:
    yield
    trainer, model, _ = job.make_trainer(attempt=next(ATTEMPTS))
    trainer.start()
    model(torch.ones(1, 20)).sum().backward()
    trainer.step()
    trainer.close()
    assert job.servers[0].failure is None


def test_garbage_instead_of_a_greeting(job, caplog):
    with peer_of(job) as peer, caplog.at_level(logging.WARNING):
        peer.socket.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
        assert "not a fleet frame: it starts with b'GET '" in str(peer.expect_error())
        wait_for(lambda: "refused a data connection from 127.0.0.1" in caplog.text, "the server's log")


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_peer_of_another_version_is_refused_by_both_versions(job, version):
    with peer_of(job) as peer:
        greeting = bytearray(peer.greeting())
        greeting[4] = version
        peer.socket.sendall(greeting)
        words = (
            f"the peer uses version {version} of the frame protocol, and this process uses version {VERSION}"
        )
        assert words in str(peer.expect_error())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"job": 5}, "a frame of job 0000000000000005", id="another-job"),
        pytest.param({"trainer": 1}, "trainer 1 with attempt .* has not joined", id="a-trainer-that-is-none"),
        pytest.param({"trainer": 4_000_000_000}, "trainer 4000000000", id="a-trainer-far-out-of-range"),
        pytest.param(
            {"attempt": 999},
            "trainer 0 with attempt 999 has not joined.*expected attempt",
            id="another-attempt",
        ),
    ],
)
def test_a_greeting_of_somebody_else(job, fields, words):
    with peer_of(job) as peer:
        peer.socket.sendall(peer.greeting(**fields))
        with pytest.raises(FleetError, match=words):
            raise peer.expect_error()


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        pytest.param(
            {"incarnation": "another", "num_blocks": 6, "session": "", "taken": 0, "shared": False},
            "incarnation='another'",
            id="an-older-life",
        ),
        pytest.param({"incarnation": 7}, "HELLO frame carries", id="not-the-object-expected"),
        pytest.param(None, "expected an object", id="null"),
    ],
)
def test_a_greeting_that_says_the_wrong_thing(job, hello, words):
    with peer_of(job) as peer:
        peer.send(Kind.HELLO, json.dumps(hello).encode())
        assert words in str(peer.expect_error())


def test_a_frame_before_the_greeting(job):
    with peer_of(job) as peer:
        peer.send(Kind.PULL)
        assert "sent PULL in the state 'start', expected HELLO" in str(peer.expect_error())


def test_a_greeting_cut_at_every_byte(job):
    with peer_of(job) as first:
        whole = first.greeting()
        for cut in range(len(whole)):
            with socket.create_connection((HOST, first.reply.data_port), timeout=10) as cut_off:
                cut_off.sendall(whole[:cut])
        first.greet()


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 100])
def test_a_gradient_cut_short(job, cut):
    with peer_of(job) as peer:
        peer.greet()
        step = job.servers[0].server.stats().step
        peer.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]), step=step)
        size = peer.blocks[0].numel * 4
        peer.socket.sendall(peer.frame(Kind.GRAD, bytes(size), step=step, block=0)[:cut])


def test_gradients_cut_short_leave_their_receive_buffers_to_other_trainers():
    settings = replace(PATIENT, transport="tcp")
    large = torch.nn.Linear(512, 1024, bias=False)  # the server has receive buffers for two gradients
    with loopback(trainers=3, mode=Async(), model=lambda: copy.deepcopy(large), settings=settings) as job:
        for trainer in (1, 2):
            with peer_of(job, trainer) as peer:
                peer.greet()
                peer.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]))
                gradient = peer.frame(Kind.GRAD, bytes(peer.blocks[0].numel * 4), block=0)
                peer.socket.sendall(gradient[: len(gradient) // 2])
        trainer, model, _ = job.make_trainer()
        trainer.start()
        before = model.weight.detach().clone()
        model(torch.ones(1, 512)).sum().backward()
        trainer.step()
        assert torch.equal(model.weight, before - 0.1)
        trainer.complete()


@pytest.mark.parametrize(
    ("kind", "payload", "fields", "words"),
    [
        pytest.param(
            Kind.GRAD,
            b"",
            {"block": 0},
            "sent GRAD in the state 'open', expected PULL, LOOK_UP, HYPER",
            id="too-early",
        ),
        pytest.param(
            Kind.PARAM, b"", {"block": 0}, "sent PARAM in the state 'open'", id="the-servers-own-kind"
        ),
        pytest.param(Kind.PULL, b"", {"job": 5}, "the identity job 0000000000000005", id="another-job"),
        pytest.param(Kind.PULL, b"", {"attempt": 999}, "attempt 999", id="another-attempt"),
        pytest.param(Kind.PULL, b"x", {}, "carries 1 bytes, expected 0", id="trailing-bytes"),
        pytest.param(
            Kind.HYPER, b"{}", {"step": 99}, "expected a list with an object per param group", id="no-list"
        ),
        pytest.param(Kind.HYPER, b"\xff", {"step": 99}, "expected JSON", id="no-json"),
    ],
)
def test_a_frame_out_of_place(job, kind, payload, fields, words):
    with peer_of(job) as peer:
        peer.greet()
        peer.send(kind, payload, **fields)
        assert words in str(peer.expect_error())


def test_trailing_garbage_after_a_whole_step(job):
    with peer_of(job) as peer:
        peer.greet()
        peer.pull()
        for _ in peer.blocks:
            assert peer.receive()[0].kind is Kind.PARAM
        peer.socket.sendall(b"\0" * HEADER_BYTES)
        assert "it starts with b'\\x00\\x00\\x00\\x00'" in str(peer.expect_error())


def test_a_gradient_for_a_step_that_is_not_there_yet(job):
    with peer_of(job) as peer:
        peer.greet()
        step = job.servers[0].server.stats().step
        peer.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]), step=step + 5)
        peer.send(Kind.GRAD, bytes(peer.blocks[0].numel * 4), step=step + 5, block=0)
        assert f"for step {step + 5}, expected step {step}" in str(peer.expect_error())


def test_another_process_does_not_take_a_session_on(job):
    with peer_of(job) as peer:
        peer.greet()
        peer.connect_again()
        peer.socket.sendall(peer.greeting(session="another"))
        words = f"another process has connected as trainer 0 with attempt {peer.attempt}"
        assert words in str(peer.expect_error())


def test_a_session_is_taken_on_with_what_was_not_taken(job):
    with peer_of(job) as peer:
        peer.greet()
        peer.pull()
        first = [peer.receive() for _ in peer.blocks]
        peer.connect_again()
        peer.socket.sendall(peer.greeting(taken=2))
        assert read_hello(peer.receive()[1]).taken == 1
        assert [peer.receive() for _ in peer.blocks[2:]] == first[2:]


def test_a_connection_that_was_given_up_before_it_was_greeted_does_not_end_the_one_in_use(job, caplog):
    with peer_of(job) as peer:
        peer.greet()
        given_up = socket.create_connection((HOST, peer.reply.data_port), timeout=10)
        with (
            job.servers[0].server._trainers.sessions[0]._resumption.lock,
            given_up,
        ):  # as while the server takes a frame
            given_up.sendall(peer.greeting())
        wait_for(lambda: "was given up at the other end before it was greeted" in caplog.text, "the log")
        peer.pull()
        assert peer.receive()[0].kind is Kind.PARAM


@pytest.mark.parametrize("taken", [1, 2**40])
def test_frames_that_were_never_sent_cannot_have_been_taken(job, taken):
    with peer_of(job) as peer:
        peer.socket.sendall(peer.greeting(taken=taken))
        assert peer.receive()[0].kind is Kind.HELLO
        assert f"greets with {taken} frames taken, expected 0 to 0" in str(peer.expect_error())
