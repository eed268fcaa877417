"""What somebody who reaches the servers' ports, and has not the key of the job, can do to them: nothing."""

import contextlib
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fleet.checkpoint import TrainStatus, find_checkpoint
from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.control.channel import open_channel
from fleet.parameter_server.control.guard import MOST_TRIES, Prover, prover_of
from fleet.parameter_server.control.proto import control_pb2, control_pb2_grpc
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.parameter_server.transport import handshake
from fleet.plan import ClipGradByGlobalNorm
from fleet.process.connections import HalfOpen, Relay
from fleet.wire import Header, Hello, Kind, Side, job_hash, pack_header
from fleet.wire.messages import pack_hello
from fleet.wire.proof import CHALLENGE_BYTES, MAC_BYTES, greeting_mac
from tests.support import replicas
from tests.support.parameter_server import HOST, QUICK, Loopback, loopback
from tests.support.processes import wait_for

KEY, OTHER = b"k" * 32, b"o" * 32
TRAINER = control_pb2.Trainer(id=0, attempt=0)
HIGHEST = control_pb2.Trainer(id=0, attempt=(1 << 32) - 1)
SERVICE = control_pb2.DESCRIPTOR.services_by_name["ParameterServer"]
CALLS = {
    "Join": control_pb2.JoinRequest(job_name="loopback", job_uid="uid-1", trainer=HIGHEST),
    "Completed": control_pb2.CompletedRequest(job_name="loopback", job_uid="uid-1"),
    "Heartbeat": control_pb2.HeartbeatRequest(trainer=TRAINER),
    "Barrier": control_pb2.BarrierRequest(trainer=TRAINER),
    "Stats": control_pb2.StatsRequest(),
    "Norm": control_pb2.NormRequest(job_name="loopback", job_uid="uid-1"),
    "State": control_pb2.StateRequest(values=True),
    "Reduce": control_pb2.ReduceRequest(trainer=TRAINER),
    "Save": control_pb2.SaveRequest(trainer=TRAINER, directory="checkpoints"),
    "Part": control_pb2.PartRequest(trainer=TRAINER, save="a", data=b"part"),
    "FoundPart": control_pb2.FoundPartRequest(trainer=TRAINER),
    "Written": control_pb2.WrittenRequest(trainer=TRAINER, save="a"),
    "Status": control_pb2.StatusRequest(trainer=TRAINER),
    "Commit": control_pb2.CommitRequest(trainer=TRAINER, directory="checkpoints"),
    "Load": control_pb2.LoadRequest(trainer=TRAINER),
    "Checkpoints": control_pb2.CheckpointsRequest(trainer=TRAINER, directory="checkpoints"),
    "Write": control_pb2.WriteRequest(trainer=TRAINER),
}


@pytest.fixture
def job() -> Iterator[Loopback]:
    with loopback(key=KEY) as running:
        yield running


@contextlib.contextmanager
def calling(endpoint: str, key: bytes = b"", server: int = 0) -> Iterator[Any]:
    """Open a channel to a server as somebody with this key, or without one; give its stub."""
    # On a slow machine gRPC takes the connection for a long one, and makes room for all of a stream.
    fixed_windows = (("grpc.http2.bdp_probe", 0),)
    with open_channel(endpoint, prover_of(key, server), fixed_windows) as channel:
        yield control_pb2_grpc.ParameterServerStub(channel)


def told(stub: Any, method: str) -> tuple[grpc.StatusCode, str]:
    """Return what a caller is told, who must not be answered."""
    call = getattr(stub, method)
    with pytest.raises(grpc.RpcError) as raised:
        list(call(CALLS[method], timeout=10)) if method == "State" else call(CALLS[method], timeout=10)
    error: Any = raised.value
    return error.code(), error.details()


def test_these_are_all_methods():
    assert set(CALLS) == {method.name for method in SERVICE.methods}


@pytest.mark.parametrize("method", sorted(CALLS))
@pytest.mark.parametrize(
    ("key", "server"),
    [
        pytest.param(b"", 0, id="without-a-key"),
        pytest.param(OTHER, 0, id="with-another-jobs"),
        pytest.param(KEY, 1, id="with-a-proof-that-was-meant-for-another-server"),
    ],
)
def test_a_stranger_is_told_nothing(job: Loopback, method: str, key: bytes, server: int):
    with calling(job.endpoints[0], key, server) as stub:
        assert told(stub, method) == (grpc.StatusCode.UNAUTHENTICATED, "")


def test_a_training_goes_on_as_if_no_stranger_had_come(job: Loopback):
    trainer, model, _ = job.make_trainer()
    trainer.start()
    with calling(job.endpoints[0]) as stub:
        told(stub, "Join")
    model(torch.ones(1, 20)).sum().backward()
    trainer.step()
    trainer.complete()
    job.servers[0].join()
    assert job.servers[0].failure is None


def test_a_trainer_with_another_key_is_told_what_to_do():
    with loopback(key=KEY) as job:
        job.job = replace(job.job, key=OTHER)
        trainer, _, _ = job.make_trainer()
        with pytest.raises(ConfigurationError, match="give all replicas the same FLEET_JOB_KEY"):
            trainer.start()


def test_the_kubelets_probe_hears_only_whether_it_serves(job: Loopback):
    with grpc.insecure_channel(job.endpoints[0]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "anything"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer == health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=10))
        error: Any = refused.value
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAUTHENTICATED, "")


class Overheard(grpc.UnaryUnaryClientInterceptor):
    """Keeps the metadata of calls, as somebody on the way could."""

    def __init__(self) -> None:
        self.metadata: list[tuple[str, str]] = []

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        self.metadata += client_call_details.metadata
        return continuation(client_call_details, request)


def test_what_was_overheard_serves_for_no_other_call_and_not_for_long(job: Loopback):
    heard = Overheard()
    with grpc.insecure_channel(job.endpoints[0]) as channel:
        stub: Any = control_pb2_grpc.ParameterServerStub(
            grpc.intercept_channel(channel, Prover(KEY, 0), heard)
        )
        stub.Stats(CALLS["Stats"], timeout=10)
        said = {"metadata": tuple(heard.metadata), "timeout": 10}
        assert KEY.hex() not in str(said)
        stub = control_pb2_grpc.ParameterServerStub(channel)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            stub.Join(CALLS["Join"], **said)
        for _ in range(MOST_TRIES - 1):  # as often as gRPC itself may make a call again
            stub.Stats(CALLS["Stats"], **said)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            stub.Stats(CALLS["Stats"], **said)


def peak_bytes() -> int:
    """Return the most memory that this process has had since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


SENDS_MUCH = """
import grpc, sys
options = [("grpc.max_send_message_length", -1)]
with grpc.insecure_channel(sys.argv[1], options=options) as channel:
    calls = [channel.unary_unary(sys.argv[2]) for _ in range(4)]
    answers = [call.future(bytes(100 << 20), timeout=60) for call in calls]
    print([answer.exception().code().name if answer.exception() else "OK" for answer in answers])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the memory")
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        pytest.param(f"/{SERVICE.full_name}/Heartbeat", "UNAUTHENTICATED", id="a-call-without-a-proof"),
        pytest.param("/grpc.health.v1.Health/Check", "OK", id="a-probe"),
    ],
)
def test_a_strangers_messages_are_not_read(job: Loopback, method: str, expected: str):
    forget_peak()
    before = peak_bytes()
    attack = [sys.executable, "-c", SENDS_MUCH, job.endpoints[0], method]
    done = subprocess.run(attack, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == str([expected] * 4)
    assert peak_bytes() - before < 64 << 20


@pytest.mark.parametrize("method", ["Heartbeat", "Join", "Commit"])
def test_a_call_that_carries_no_tensor_may_not_be_large(job: Loopback, method: str):
    with open_channel(job.endpoints[0], prover_of(KEY, 0)) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE.full_name}/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            call(bytes(17 << 20), timeout=30)
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.INTERNAL


def test_no_message_may_be_larger_than_what_a_training_needs(job: Loopback):
    with open_channel(job.endpoints[0], prover_of(KEY, 0)) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE.full_name}/Write")
        with pytest.raises(grpc.RpcError) as refused:
            call(bytes(257 << 20), timeout=60)
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def large_model() -> torch.nn.Module:
    return torch.nn.Linear(2000, 2000)


def test_streams_that_nobody_takes_keep_no_sign_of_life_waiting_and_end():
    """Without reading, nothing more fits into an HTTP/2 window than its size."""
    # The stream that is taken has that second for each piece too, however busy this machine is.
    settings = replace(QUICK, deadline_seconds=1.0, start_deadline_seconds=60.0)
    with (
        loopback(trainers=4, key=KEY, model=large_model, settings=settings) as job,
        calling(job.endpoints[0], KEY) as stub,
    ):
        request = control_pb2.StateRequest(values=True)
        streams = [stub.State(request) for _ in range(16)]  # more than the threads that answer other calls
        for _ in range(5):
            stub.Heartbeat(CALLS["Heartbeat"], timeout=10)
        stub.Stats(control_pb2.StatsRequest(), timeout=10)
        taken = list(stub.State(request, timeout=60))  # once those before it have ended
        assert sum(len(piece.data) for piece in taken) == 4 * (2000 * 2000 + 2000)
        assert any(was_cancelled(stream) for stream in streams)


def was_cancelled(stream: Any) -> bool:
    """Read a stream to its end."""
    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        return "CANCELLED" in str(error)
    return False


def data_port(job: Loopback) -> tuple[str, int]:
    """Return where a server listens for data, which any port scan finds."""
    ports = job.servers[0].server._ports
    assert ports is not None
    return HOST, ports.port


def train(job: Loopback, trainer: Trainer, model: Any) -> None:
    """Make a step, and end the training well."""
    model(torch.ones(1, 20)).sum().backward()
    trainer.step()
    trainer.complete()
    job.servers[0].join()
    assert job.servers[0].failure is None


def greets_without_a_key(connected: socket.socket, hello: bytes) -> None:
    connected.sendall(hello)


def greets_with_another_key(connected: socket.socket, hello: bytes) -> None:
    challenge, answer = connected.recv(CHALLENGE_BYTES, socket.MSG_WAITALL), bytes(CHALLENGE_BYTES)
    connected.sendall(answer + greeting_mac(OTHER, Side.TRAINER, challenge, answer) + hello)


def sends_back_what_it_hears(connected: socket.socket, hello: bytes) -> None:
    challenge = connected.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
    connected.sendall(challenge + challenge + hello)


def repeats_what_was_overheard(connected: socket.socket, hello: bytes) -> None:
    answer = bytes(CHALLENGE_BYTES)
    connected.sendall(answer + greeting_mac(KEY, Side.TRAINER, bytes(CHALLENGE_BYTES), answer) + hello)


@pytest.mark.parametrize(
    "greets",
    [greets_without_a_key, greets_with_another_key, sends_back_what_it_hears, repeats_what_was_overheard],
)
def test_a_stranger_at_the_data_port_takes_no_trainers_place_and_is_told_nothing(
    job: Loopback, greets: Callable[[socket.socket, bytes], None], each_transport: None
):
    trainer, model, _ = job.make_trainer()
    trainer.start()
    server = job.servers[0].server
    hello = pack_hello(Hello(server._serving.incarnation, len(trainer.plan.blocks), "a" * 16))
    header = Header(Kind.HELLO, job_hash("loopback", "uid-1"), 0, 0, payload_bytes=len(hello))
    with socket.create_connection(data_port(job), timeout=10) as connected:
        greets(connected, pack_header(header) + hello)
        heard = b""
        with contextlib.suppress(ConnectionResetError):  # what it sent too much was never read
            while more := connected.recv(1 << 16):
                heard += more
    assert len(heard) <= CHALLENGE_BYTES
    train(job, trainer, model)


def test_a_trainer_tells_nothing_to_a_server_without_the_key(monkeypatch: pytest.MonkeyPatch):
    """Somebody has the server's address: the trainer offers it neither its memory nor a gradient."""
    heard: list[bytes] = []

    def impostor(connected: socket.socket, *_: object, **__: object) -> None:
        connected.settimeout(10)
        connected.sendall(bytes(CHALLENGE_BYTES))
        heard.append(connected.recv(CHALLENGE_BYTES + MAC_BYTES, socket.MSG_WAITALL))
        connected.sendall(bytes(MAC_BYTES))
        heard.append(connected.recv(1))

    monkeypatch.setattr("fleet.parameter_server.transport.handshake.accept", impostor)
    with loopback(key=KEY, settings=replace(QUICK, retry_times=0)) as job:
        trainer, _, _ = job.make_trainer()
        with pytest.raises(FleetError, match="the server there does not have this job's key"):
            trainer.start()
    assert [len(each) for each in heard] == [CHALLENGE_BYTES + MAC_BYTES, 0]


@pytest.mark.parametrize("key", [b"", KEY], ids=["without-a-key", "with-one"])
def test_of_many_that_never_greet_few_are_kept_and_none_keeps_a_trainer_out(
    key: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fleet.parameter_server.transport.handshake.GREETING_SECONDS", 60.0)
    monkeypatch.setattr(handshake, "HalfOpen", lambda: HalfOpen(seconds=60.0))
    with loopback(key=key) as job, contextlib.ExitStack() as opened:
        before = threading.active_count()
        for _ in range(300):
            connected = opened.enter_context(socket.create_connection(data_port(job), timeout=10))
            connected.sendall(b"F")
        trainer, model, _ = job.make_trainer()
        trainer.start()  # the last in line, so all have come in
        wait_for(lambda: threading.active_count() - before < 3 * 64, "the oldest to be given up")
        train(job, trainer, model)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
"""What a client of gRPC says first, with settings that change nothing."""


@pytest.fixture
def open_connections() -> Iterator[Callable[..., None]]:
    """Open idle connections as a client of gRPC does, from an address of this machine; as many as told to."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    with contextlib.ExitStack() as opened:

        def connect(endpoint: str, count: int, source: str = HOST) -> None:
            host, _, port = endpoint.rpartition(":")
            for _ in range(count):
                at = (host, int(port))
                connected = socket.create_connection(at, timeout=20, source_address=(source, 0))
                opened.enter_context(connected)
                connected.sendall(PREFACE)

        yield connect
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is open")
@pytest.mark.timeout(300)
def test_of_many_that_never_call_few_are_kept_and_neither_saves_nor_trainers_suffer(
    tmp_path: Path, open_connections: Callable[..., None]
):
    script, folder = Path(__file__).parent / "scripts" / "kills.py", tmp_path / "checkpoints"
    environ = {
        "FLEET_JOB_KEY": KEY.hex(),
        "FLEET_CHECKPOINT_DIR": str(folder),
        "SAVE_EVERY": "5",
        "PAUSE": "0.02",
        "FLAGS_rpc_deadline": "60000",
        "FLEET_HEARTBEAT_SECONDS": "0.2",
    }
    with replicas.job(tmp_path, 1, 2, 1, **environ) as running:
        server = running.server(0, script, "60")
        running.wait_until_serving(0)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        stays, ends = (running.trainer(index, script, "60") for index in range(2))
        ends.wait_for_output("made step 3", seconds=120)
        open_connections(running.endpoints[0], 3000)
        ends.kill()
        back = running.trainer(1, script, "60", FLEET_RESTARTS="1")
        back.wait_for_output("made step ", seconds=120)
        assert len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < 64 * 4 + 200
        for each in (stays, back, server):
            each.expect(0, seconds=120)
    assert "no room" not in stays.output
    found = find_checkpoint(folder)
    assert found is not None
    assert found.manifest.step == 60


@pytest.mark.skipif(sys.platform != "linux", reason="only there 127.0.0.2 is an address of every machine")
def test_a_stranger_who_keeps_connecting_keeps_no_trainer_out(
    job: Loopback, open_connections: Callable[..., None]
):
    """Whoever opens many takes the places of its own connections, and of no other host's."""
    over, flooded = threading.Event(), threading.Event()

    def flood() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):  # it has been ended already
                open_connections(job.endpoints[0], 100, "127.0.0.2")
            flooded.set()

    stranger = threading.Thread(target=flood)
    stranger.start()
    try:
        assert flooded.wait(60)
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(job, trainer, model)
    finally:
        over.set()
        stranger.join()


def test_what_has_proved_the_key_once_may_be_silent(job: Loopback, open_connections: Callable[..., None]):
    host, _, port = job.endpoints[0].rpartition(":")
    dialled: list[socket.socket] = []

    def dial(_: socket.socket) -> socket.socket:
        dialled.append(socket.create_connection((host, int(port)), timeout=10))
        return dialled[-1]

    relay = Relay(socket.create_server((HOST, 0)), dial)
    with contextlib.closing(relay), calling(f"{HOST}:{relay.port}", KEY) as stub:
        stub.Stats(CALLS["Stats"], timeout=10)
        open_connections(job.endpoints[0], 200)
        with calling(job.endpoints[0], KEY) as last:  # in line behind all of them
            last.Stats(CALLS["Stats"], timeout=10)
        stub.Stats(CALLS["Stats"], timeout=10, wait_for_ready=False)
        assert len(dialled) == 1, "its connection was not closed, so gRPC has opened no other"


def test_a_greeting_has_a_deadline_as_a_whole(monkeypatch: pytest.MonkeyPatch):
    """One byte after the other, each well before the next time-out, is no way to stay."""
    monkeypatch.setattr(handshake, "HalfOpen", lambda: HalfOpen(seconds=0.5))
    with loopback() as job, socket.create_connection(data_port(job), timeout=10) as connected:
        connected.settimeout(0.1)
        for byte in pack_header(Header(Kind.HELLO, 0, 0, 0))[:20]:
            with contextlib.suppress(TimeoutError):  # 0.1 s, unless the server has closed
                connected.sendall(bytes([byte]))
                assert connected.recv(1) == b""
                return
    pytest.fail("the server still listens to it")


def test_a_connection_that_breaks_is_proven_anew(caplog: pytest.LogCaptureFixture):
    with loopback(key=KEY) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for connection in trainer.session.connections:
            connection.stream.hang_up()
        train(job, trainer, model)
        assert "is back; " in caplog.text


def reaches(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=10):
        return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="only there 127.0.0.2 is an address of every machine")
@pytest.mark.parametrize("key", [b"", KEY], ids=["without-a-key", "with-one"])
def test_without_a_key_a_server_listens_on_a_loopback_address_only_and_says_so(
    key: bytes, caplog: pytest.LogCaptureFixture
):
    job = Loopback(key=key)
    port = int(job.endpoints[0].rpartition(":")[2])
    job.endpoints = [f"192.0.2.1:{port}"]  # kept for documentation: an address of no machine, as a name is
    try:
        job.start_server(0)
        for each in (port, data_port(job)[1]):
            assert reaches("127.0.0.1", each)
            assert reaches("127.0.0.2", each) is bool(key)
    finally:
        job.close()
    assert ("no job key (FLEET_JOB_KEY), so it listens on 127.0.0.1 only" in caplog.text) is not bool(key)


def address_in_the_network() -> str:
    """Return an address of this machine that is no loopback one; empty where there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 1))  # which sends nothing
        return str(probe.getsockname()[0])
    return ""


@pytest.mark.parametrize("key", [b"", KEY], ids=["without-a-key", "with-one"])
def test_a_trainer_that_cannot_reach_a_server_without_a_key_is_told_of_the_key(
    key: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fleet.parameter_server.waits.FIRST_WORD_SECONDS", 0.2)
    if not (address := address_in_the_network()) or address.startswith("127."):
        pytest.skip("this machine has no address but its loopback ones")
    job = Loopback(settings=replace(QUICK, deadline_seconds=2.0))
    job.endpoints = [f"{address}:{job.endpoints[0].rpartition(':')[2]}"]
    try:
        job.start_server(0)
        job.job = replace(job.job, key=key)  # the trainer's own does not matter
        trainer, _, _ = job.make_trainer()
        expected = r"refused; a server without the job's key.*same FLEET_JOB_KEY"
        with pytest.raises(FleetError, match=expected):
            trainer.start()
    finally:
        job.close()
    assert "to listen ([Errno 111] Connection refused; a server without the job's key" in caplog.text


def test_servers_prove_the_key_to_each_other():
    clip = ClipGradByGlobalNorm(0.1)
    with loopback(servers=2, key=KEY, grad_clip=clip) as job:
        trainer, model, _ = job.make_trainer(grad_clip=clip)
        trainer.start()
        train(job, trainer, model)


def test_not_even_a_replica_takes_a_trainers_place_by_an_attempt_that_nobody_issued(job: Loopback):
    trainer, model, _ = job.make_trainer()
    trainer.start()
    taker, _, _ = job.make_trainer(attempt=HIGHEST.attempt)
    with pytest.raises(ConfigurationError, match=r"attempt 4294967295, expected at most 1[0-9]{3}"):
        taker.start()
    train(job, trainer, model)


@pytest.mark.parametrize("save", ["", "/../../../elsewhere/x", "a" * 65, "a\0", "a b"])
def test_what_a_save_is_called_leads_to_no_other_folder(tmp_path: Path, save: str):
    """It is a part of the names of files: not even a replica may say by it where these are."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
    with loopback(key=KEY, settings=replace(QUICK, checkpoint_dir=str(folder))) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        request = control_pb2.SaveRequest(trainer=TRAINER, directory=str(folder), save=save)
        with (
            calling(job.endpoints[0], KEY) as stub,
            pytest.raises(grpc.RpcError, match="expected 1 to 64 letters and digits"),
        ):
            stub.Save(request, timeout=10)
    assert [*folder.iterdir(), *elsewhere.iterdir()] == []


def test_files_are_touched_below_the_jobs_folder_only(tmp_path: Path):
    """Not even by a replica: a script that was taken over may ask for any path that the servers see."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    folder.mkdir()
    (elsewhere / "checkpoint-0").mkdir(parents=True)
    (folder / "link").symlink_to(elsewhere)
    with loopback(key=KEY, settings=replace(QUICK, checkpoint_dir=str(folder))) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        with calling(job.endpoints[0], KEY) as stub:
            for place in (elsewhere, folder / "link", folder / ".." / "elsewhere", tmp_path):
                directory = str(place)
                for call, request in (
                    (stub.Save, control_pb2.SaveRequest(trainer=TRAINER, directory=directory, save="a")),
                    (stub.Commit, control_pb2.CommitRequest(trainer=TRAINER, directory=directory)),
                    (
                        stub.Checkpoints,
                        control_pb2.CheckpointsRequest(trainer=TRAINER, directory=directory, remove=[0]),
                    ),
                    (
                        stub.Checkpoints,
                        control_pb2.CheckpointsRequest(trainer=TRAINER, directory=directory, verify=True),
                    ),
                    (stub.Load, control_pb2.LoadRequest(trainer=TRAINER, directory=directory)),
                ):
                    with pytest.raises(grpc.RpcError, match=r"remove files only there.*init_server"):
                        call(request, timeout=10)
        trainer.save(str(folder / "checkpoint-0"), TrainStatus())
    assert [each.name for each in elsewhere.iterdir()] == ["checkpoint-0"]
    assert (folder / "checkpoint-0" / "manifest.json").is_file()
