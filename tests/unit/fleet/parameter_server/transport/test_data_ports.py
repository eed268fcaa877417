"""Where data connections are accepted: one that cannot be taken keeps none after it out."""

import socket
import threading
from collections.abc import Iterator

import pytest

from fleet.parameter_server.settings import Settings
from fleet.parameter_server.transport.data_ports import DataPorts

HOST = "127.0.0.1"


@pytest.fixture
def ports() -> Iterator[DataPorts]:
    made = DataPorts(HOST, Settings(transport="tcp"), lambda connected: connected.close())
    made.start()
    yield made
    made.close()


def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_is_taken(
    ports: DataPorts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    start, refused, greeted = threading.Thread.start, list[str](), list[str]()

    def refuses_once(thread: threading.Thread) -> None:
        if thread.name == "fleet-greet" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        greeted.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses_once)
    for _ in range(2):
        with socket.create_connection((HOST, ports.port), 10) as connected:
            assert connected.recv(1) == b""
    assert (refused, greeted) == (["fleet-greet"], ["fleet-greet"])
    assert f"cannot take a data connection from {HOST}: can't start new thread" in caplog.text
