"""A replica's progress over HTTP."""

import contextlib
import json
import os
import socket
import threading
import urllib.error
import urllib.request

import pytest

from fleet.process import progress, progress_server
from fleet.process.connections import HalfOpen
from fleet.process.progress import Progress
from fleet.process.progress_server import prometheus_text
from tests.support.processes import wait_for


def test_prometheus_text():
    subject = Progress(memory=lambda: 4096)
    subject.identify("PSERVER", 0)
    subject.holds(20)
    subject.report(step=3, loss=0.5, metrics={"test_accuracy": 0.9})
    subject.count("bytes_sent", 7)
    environ = {"FLEET_JOB_NAME": 'a"b', "FLEET_RESTARTS": "2"}
    text = prometheus_text(subject.snapshot(), environ).decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == [
        r'fleet_replica_info{attempt="2",index="0",job="a\"b",role="PSERVER"} 1.0',
        "fleet_step 3.0",
        "fleet_loss 0.5",
        "fleet_memory_bytes 4096.0",
        "fleet_parameter_bytes 20.0",
        'fleet_metric{name="test_accuracy"} 0.9',
        "fleet_bytes_sent_total 7.0",
    ]
    assert text.count("# TYPE") == len(lines)
    assert text.endswith("\n")


def test_a_server_tells_of_each_table_and_a_trainers_sums_are_no_metrics():
    told = {"name": 'a"b', "rows": 5, "bytes": 900, "rowsOnDisk": 2, "lookedUp": 40, "found": 30}
    subject = Progress()
    subject.show_tables(lambda: [{**told, "shardSkew": 1.5}])
    text = prometheus_text(subject.snapshot(), {}).decode()
    assert [line for line in text.splitlines() if line.startswith("fleet_table")] == [
        r'fleet_table_rows{table="a\"b"} 5.0',
        r'fleet_table_bytes{table="a\"b"} 900.0',
        r'fleet_table_rows_on_disk{table="a\"b"} 2.0',
        r'fleet_table_ids_looked_up_total{table="a\"b"} 40.0',
        r'fleet_table_ids_found_total{table="a\"b"} 30.0',
        r'fleet_table_shard_skew{table="a\"b"} 1.5',
    ]
    subject.show_tables(lambda: [{"name": "users", "rows": 5, "bytes": 900}])
    assert b"fleet_table" not in prometheus_text(subject.snapshot(), {})


@pytest.fixture
def address():
    host, port = progress_server.start_server("127.0.0.1", 0)
    yield f"http://{host}:{port}"
    progress_server.close()


def get(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 (ours)
        return answer.headers["Content-Type"], answer.read().decode()


def test_a_probe_learns_whether_this_process_serves(address):
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(f"{address}/readyz")
    progress.serves(True)
    assert get(f"{address}/readyz")[1] == "ok\n"
    progress.serves(False)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(f"{address}/readyz")


def test_the_server_answers_its_other_paths(address):
    progress.count("served_in_a_test")
    kind, body = get(f"{address}/progress")
    assert kind.startswith("application/json")
    assert json.loads(body)["counters"]["served_in_a_test"] >= 1
    kind, body = get(f"{address}/metrics?name=x")
    assert kind.startswith("text/plain; version=0.0.4")
    assert "fleet_served_in_a_test_total" in body
    assert get(f"{address}/healthz")[1] == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{address}/other")


def test_of_many_slow_readers_few_are_kept_and_none_keeps_the_operator_waiting(address, monkeypatch):
    monkeypatch.setattr(progress_server._Handler, "timeout", 60.0)
    before = threading.active_count()
    with contextlib.ExitStack() as opened:
        for _ in range(300):
            slow = opened.enter_context(socket.create_connection(progress_server.start_server("", 0), 10))
            slow.sendall(b"G")
        assert get(f"{address}/healthz")[1] == "ok\n"  # the last in line, so all have come in
        wait_for(lambda: threading.active_count() - before < 3 * 64, "the oldest to be given up")


def test_a_reader_has_a_deadline_as_a_whole(address, monkeypatch):
    """One byte after the other, each well before the next time-out, is no way to stay."""
    assert progress_server._server is not None
    monkeypatch.setattr(progress_server._server, "_readers", HalfOpen(seconds=0.5))
    with socket.create_connection(progress_server.start_server("", 0), timeout=0.1) as slow:
        for byte in b"GET /progress HTTP/1.0":
            with contextlib.suppress(TimeoutError):  # 0.1 s, unless it has closed
                slow.sendall(bytes([byte]))
                assert slow.recv(1) == b""
                return
    pytest.fail("the server still listens to it")


def test_a_second_start_returns_the_first_address(address):
    host, port = progress_server.start_server("127.0.0.1", 0)
    assert address == f"http://{host}:{port}"


def test_a_forked_child_does_not_hold_the_parents_port():
    _, port = progress_server.start_server("127.0.0.1", 0)
    released, told = os.pipe()
    child = os.fork()
    if child == 0:  # lives until the parent has looked
        os.close(told)
        os.read(released, 1)
        os._exit(0)
    try:
        os.close(released)
        progress_server.close()
        with pytest.raises(urllib.error.URLError, match="refused"):
            get(f"http://127.0.0.1:{port}/healthz")
    finally:
        os.close(told)
        os.waitpid(child, 0)
