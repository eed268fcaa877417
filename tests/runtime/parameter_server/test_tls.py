"""What replicas say to each other over TLS, and what becomes of those who have no certificate of the job."""

import contextlib
import shutil
import socket
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from fleet.checkpoint import MANIFEST_NAME, TrainStatus
from fleet.errors import ConfigurationError
from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.control.channel import ServerStub, check_encrypts, open_channel
from fleet.parameter_server.control.guard import Prover, prover_of
from fleet.parameter_server.control.proto import control_pb2, control_pb2_grpc
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import server_connection
from fleet.parameter_server.transport import handshake
from fleet.parameter_server.transport.sockets import bytes_moved, dial, receive_exactly, send_all
from fleet.parameter_server.transport.tls import RECORD_BYTES, TlsError, TlsSocket
from fleet.plan import ClipGradByGlobalNorm
from fleet.process import progress_server
from fleet.process.connections import HalfOpen
from fleet.wire import HEADER_BYTES
from tests.support.certificates import Authority, make_authority
from tests.support.parameter_server import HOST, QUICK, Loopback, loopback, sgd, small_model
from tests.support.processes import wait_for
from tests.support.threads import at_once
from tests.support.training import Training, assert_same_bits, train_together

KEY = b"k" * 32
TCP = replace(QUICK, transport="tcp")
STATS = control_pb2.StatsRequest()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def issued(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the Secret of a job has it."""
    return authority.issue(tmp_path_factory.mktemp("issued"))


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of another authority."""
    folder = tmp_path_factory.mktemp("strange")
    return make_authority(folder / "authority").issue(folder / "issued")


def encrypted(folder: Path, **changes: Any) -> Settings:
    return replace(TCP, tls_dir=str(folder), **changes)


@pytest.fixture
def job(issued: Path) -> Iterator[Loopback]:
    with loopback(key=KEY, settings=encrypted(issued)) as running:
        yield running


def train(job: Loopback, steps: int = 1) -> None:
    """Train with one trainer from beginning to end."""
    trainer, model, _ = job.make_trainer()
    trainer.start()
    for _ in range(steps):
        model(torch.ones(1, 20)).sum().backward()
        trainer.step()
    trainer.complete()
    job.servers[0].join()
    assert job.servers[0].failure is None


def backward(model: torch.nn.Module, step: int, trainer: int, _: object) -> None:
    inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + trainer))
    model(inputs).square().mean().backward()


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
@pytest.mark.parametrize("clip", [None, ClipGradByGlobalNorm(0.1)], ids=["plain", "clipped-by-norm"])
def test_what_is_learnt_is_equal_to_the_bit(issued: Path, transport: str, clip: Any):
    """Clipped by norm, the servers call each other."""
    settings = replace(TCP, transport=transport)
    learnt = [
        train_together(Training(small_model, sgd, backward), key=KEY, grad_clip=clip, settings=each)
        for each in (settings, replace(settings, tls_dir=str(issued)))
    ]
    assert_same_bits(learnt[1][0], learnt[0][0])
    assert_same_bits(learnt[1][1], learnt[0][1])


class Wiretap:
    """Stands between a trainer and the data ports, and keeps all that passes."""

    def __init__(self) -> None:
        self.heard = bytearray()

    def dial(self, host: str, port: int, **options: Any) -> socket.socket:
        """Connect as `sockets.dial` does, through this."""
        listener = socket.create_server((HOST, 0))
        there = socket.create_connection((host, port))
        threading.Thread(target=self._relay, args=(listener, there), daemon=True).start()
        return dial(HOST, listener.getsockname()[1], **options)

    def _relay(self, listener: socket.socket, there: socket.socket) -> None:
        with listener:
            here, _ = listener.accept()
        back = threading.Thread(target=self._pass_on, args=(there, here), daemon=True)
        back.start()
        self._pass_on(here, there)
        back.join()
        here.close()
        there.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("encrypts", [False, True], ids=["without-tls", "with-tls"])
def test_who_listens_on_the_way_reads_no_parameter_only_with_tls(
    issued: Path, monkeypatch: pytest.MonkeyPatch, encrypts: bool
):
    tap = Wiretap()
    monkeypatch.setattr(server_connection, "dial", tap.dial)
    with loopback(key=KEY, settings=encrypted(issued) if encrypts else TCP) as job:
        _, program = job.transpile()
        assert program.source is not None
        secret = next(iter(program.source.parameters.values())).detach().numpy().tobytes()[:64]
        train(job)
    assert len(tap.heard) > 20 * 1000 * 4
    assert (secret in tap.heard) is not encrypts


def data_port(job: Loopback) -> tuple[str, int]:
    """Return where a server listens for data, which any port scan finds."""
    ports = job.servers[0].server._ports
    assert ports is not None
    return HOST, ports.port


def comes_without_a_certificate(job: Loopback, strange: Path) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(data_port(job), timeout=10) as connected, pytest.raises(OSError):
        context.wrap_socket(connected).recv(1)
    return "it presents no certificate"


def comes_with_one_of_another_authority(job: Loopback, strange: Path) -> str:
    certificates = Certificates(strange)
    certificates.current().client.load_verify_locations(Path(job.settings.tls_dir) / "ca.crt")  # of the job
    with TlsSocket(socket.create_connection(data_port(job), timeout=10), certificates, HOST) as connected:
        connected.handshake()  # in TLS 1.3 a client is done before its certificate is looked at
        with pytest.raises(TlsError, match="it refuses this process's certificate, which is of another auth"):
            receive_exactly(connected, memoryview(bytearray(1)))
    return "its certificate is refused: self-signed certificate in certificate chain"


def comes_without_tls(job: Loopback, strange: Path) -> str:
    with socket.create_connection(data_port(job), timeout=10) as connected:
        connected.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert len(connected.recv(1 << 16)) < 32  # an alert
    return "it does not speak TLS: give all replicas of the job FLEET_TLS_DIR, or none"


@pytest.mark.parametrize(
    "comes", [comes_without_a_certificate, comes_with_one_of_another_authority, comes_without_tls]
)
def test_the_data_port_names_who_is_refused_and_hears_nothing(
    job: Loopback,
    strange: Path,
    caplog: pytest.LogCaptureFixture,
    comes: Callable[[Loopback, Path], str],
):
    reason = comes(job, strange)
    wait_for(lambda: f"refused a data connection from {HOST}: {reason}" in caplog.text, "the refusal")
    train(job)


def call(endpoint: str, certificates: Certificates | None) -> None:
    """Call a server as somebody who has the key of the job, and these certificates."""
    with open_channel(endpoint, prover_of(KEY, 0), (), certificates) as channel:
        control_pb2_grpc.ParameterServerStub(channel).Stats(STATS, timeout=10)


def test_calls_are_taken_with_a_certificate_of_the_job_only(job: Loopback, issued: Path, strange: Path):
    endpoint = job.endpoints[0]
    call(endpoint, Certificates(issued))
    for other in (None, Certificates(strange)):
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            call(endpoint, other)
    authority = (issued / "ca.crt").read_bytes()
    with grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(authority)) as channel:
        proven: Any = grpc.intercept_channel(channel, Prover(KEY, 0))
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            control_pb2_grpc.ParameterServerStub(proven).Stats(STATS, timeout=10)


def test_a_certificate_does_not_stand_for_the_key(job: Loopback, issued: Path):
    with (
        open_channel(job.endpoints[0], None, (), Certificates(issued)) as channel,
        pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"),
    ):
        control_pb2_grpc.ParameterServerStub(channel).Stats(STATS, timeout=10)


@pytest.mark.parametrize(
    ("server", "trainer", "expected"),
    [
        pytest.param("issued", "", "it accepts only TLS: set FLEET_TLS_DIR", id="trainer-plain"),
        pytest.param("", "issued", "it does not speak TLS: give all replicas of the job", id="server-plain"),
        pytest.param(
            "issued", "strange", "its certificate is refused: unable to get local iss", id="other-ca"
        ),
        pytest.param(
            "elsewhere", "issued", "its certificate is refused: IP address mismatch", id="other-host"
        ),
    ],
)
def test_a_trainer_that_does_not_fit_its_server_is_told_why(
    authority: Authority,
    issued: Path,
    strange: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: str,
    trainer: str,
    expected: str,
):
    monkeypatch.setattr("fleet.parameter_server.control.client.FIRST_WORD_SECONDS", 0.0)
    elsewhere = authority.issue(tmp_path, ["DNS:elsewhere"])
    folders = {"": "", "issued": str(issued), "strange": str(strange), "elsewhere": str(elsewhere)}
    with loopback(key=KEY, settings=replace(TCP, tls_dir=folders[server])) as job:
        job.settings = replace(TCP, tls_dir=folders[trainer])
        joining, _, _ = job.make_trainer()
        with pytest.raises(ConfigurationError, match=f"{job.endpoints[0]}: {expected}"):
            joining.start()


def test_the_kubelets_probe_is_answered_beside_what_is_encrypted(issued: Path):
    """Kubernetes' probes by gRPC know no TLS, and must learn whether the server takes calls all the same."""
    host, port = progress_server.start_server(HOST, 0)
    url = f"http://{host}:{port}/readyz"
    with loopback(key=KEY, settings=encrypted(issued)), urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(url, timeout=10)


def test_of_servers_that_fit_or_are_not_there_nothing_is_said(job: Loopback, issued: Path):
    check_encrypts(job.endpoints[0], Certificates(issued))
    with loopback(key=KEY, settings=TCP) as plain:
        check_encrypts(plain.endpoints[0], None)
    check_encrypts(plain.endpoints[0], None)


def test_one_name_may_stand_for_every_server(authority: Authority, tmp_path: Path):
    folder = authority.issue(tmp_path, ["DNS:digits"])
    with loopback(key=KEY, settings=encrypted(folder, tls_server_name="digits")) as job:
        train(job)


def test_renewed_files_are_used_by_what_connects_from_then_on(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """With another authority, even: both ends then have the new files."""
    folder = authority.issue(tmp_path / "issued")
    before = tmp_path / "before"
    shutil.copytree(folder, before)
    with loopback(key=KEY, settings=encrypted(folder)) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        stub = ServerStub(job.endpoints[0], prover_of(KEY, 0), (), Certificates(folder))
        stub.now.Stats(STATS, timeout=10)
        make_authority(tmp_path / "another").issue(folder)
        stub.now.Stats(STATS, timeout=10)
        stub.close()
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            call(job.endpoints[0], Certificates(before))
        for connection in trainer.session.connections:
            connection.stream.hang_up()
        model(torch.ones(1, 20)).sum().backward()
        trainer.step()
        trainer.complete()
        job.servers[0].join()
        assert job.servers[0].failure is None
    assert "is back; " in caplog.text


def test_a_checkpoint_is_saved_after_several_renewals(authority: Authority, tmp_path: Path):
    folder = authority.issue(tmp_path / "issued")
    with loopback(key=KEY, settings=encrypted(folder)) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        for _ in range(3):  # each opens another channel for calls, and all but the newest two are closed
            authority.issue(folder)
            trainer.session.calls.barrier()
        trainer.save(str(tmp_path / "saved"), TrainStatus())
        trainer.complete()
    assert (tmp_path / "saved" / MANIFEST_NAME).exists()


def test_calls_reach_a_server_that_has_come_back_with_renewed_files(authority: Authority, tmp_path: Path):
    folder = authority.issue(tmp_path / "issued")
    with loopback(key=KEY, settings=encrypted(folder)) as job:
        stub = ServerStub(job.endpoints[0], prover_of(KEY, 0), (), Certificates(folder))
        stub.now.Stats(STATS, timeout=10)
        job.servers[0].server.close()
        make_authority(tmp_path / "another").issue(folder)
        job.start_server(0)
        stub.now.Stats(STATS, timeout=20, wait_for_ready=True)
        stub.close()


def test_new_files_that_cannot_be_used_are_named_once_and_those_before_stay(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = authority.issue(tmp_path)
    certificates = Certificates(folder)
    loaded = certificates.current()
    (folder / "tls.key").write_text("half of a k")
    assert certificates.current() is certificates.current() is loaded
    assert caplog.text.count("tls.key hold no certificate with its key; expected both in PEM") == 1
    authority.issue(folder)
    assert certificates.current() is not loaded


def test_a_server_whose_certificate_has_expired_does_not_start(authority: Authority, tmp_path: Path):
    folder = authority.issue(tmp_path, days=-1)
    expected = (
        "tls.crt .FLEET_TLS_DIR. is refused with ca.crt: certificate has expired; expected a currently valid"
    )
    with pytest.raises(ConfigurationError, match=expected), loopback(settings=encrypted(folder)):
        pass


@contextlib.contextmanager
def pair(certificates: Certificates) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Give both ends of an encrypted connection, after the handshake."""
    with socket.create_server((HOST, 0)) as listener:
        opened = socket.create_connection(listener.getsockname(), timeout=30)
        taken, _ = listener.accept()
    with TlsSocket(opened, certificates, HOST) as client, TlsSocket(taken, certificates) as server:
        at_once(client.handshake, server.handshake)
        yield client, server


def test_both_directions_move_at_once_without_waiting_for_each_other(issued: Path):
    """More than all buffers hold, so that an end which receives only after it has sent waits for ever."""
    sent = [bytes(torch.randint(0, 256, (8 << 20,), dtype=torch.uint8).numpy()) for _ in range(2)]
    received = [bytearray(8 << 20) for _ in range(2)]
    with pair(Certificates(issued)) as (client, server):
        at_once(
            lambda: send_all(client, [sent[0][:40], sent[0][40:]]),
            lambda: receive_exactly(client, memoryview(received[1])),
            lambda: send_all(server, [sent[1]]),
            lambda: receive_exactly(server, memoryview(received[0])),
        )
        assert received == sent
        client.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match="it was closed at the other end"):
            receive_exactly(server, memoryview(bytearray(1)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how many bytes have moved")
def test_a_short_frame_is_longer_by_one_record(issued: Path):
    """The watchdog of a silent connection must know how long its probe is."""
    with pair(Certificates(issued)) as (client, server):
        frame = memoryview(bytearray(HEADER_BYTES))
        before = bytes_moved(server)
        send_all(client, [frame])
        receive_exactly(server, frame)
        after = bytes_moved(server)
    assert before is not None
    assert after is not None
    assert after.received - before.received == HEADER_BYTES + RECORD_BYTES


def test_what_was_changed_on_the_way_is_not_taken(issued: Path):
    with pair(Certificates(issued)) as (client, server):
        plain = socket.socket(fileno=client.detach())
        with plain:
            plain.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
            with pytest.raises(TlsError, match="TLS failed"):
                receive_exactly(server, memoryview(bytearray(1)))


def test_a_greeting_that_stops_amid_tls_ends(issued: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handshake, "HalfOpen", lambda: HalfOpen(seconds=0.5))
    with (
        loopback(key=KEY, settings=encrypted(issued)) as job,
        socket.create_connection(data_port(job), timeout=10) as connected,
    ):
        connected.sendall(b"\x16\x03\x01\x02")
        assert connected.recv(1) == b""


def test_an_impostor_with_another_certificate_is_told_nothing(issued: Path, strange: Path):
    """Somebody has the server's address: a trainer offers it neither its key's proof nor a gradient."""
    with socket.create_server((HOST, 0)) as listener:
        opened = socket.create_connection(listener.getsockname(), timeout=10)
        taken, _ = listener.accept()
    refused: list[OSError] = []

    def listen() -> None:
        try:
            impostor.handshake()
        except OSError as error:
            refused.append(error)

    with (
        TlsSocket(opened, Certificates(issued), HOST) as client,
        TlsSocket(taken, Certificates(strange)) as impostor,
        pytest.raises(TlsError, match="its certificate is refused"),
    ):
        at_once(client.handshake, listen)
    wait_for(lambda: bool(refused), "the impostor to be refused")
