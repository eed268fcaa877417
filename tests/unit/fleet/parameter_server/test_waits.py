"""Waiting in the open: the log says for whom, first soon and then ever more rarely."""

import logging
import socket

import pytest

from fleet.errors import DeadlineExceededError
from fleet.parameter_server import waits
from fleet.parameter_server.waits import WaitLog, split_endpoint, wait_for_ports


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_words_come_after_five_seconds_and_then_at_doubling_intervals(caplog):
    clock = Clock()
    log = WaitLog(clock)
    spoken: list[float] = []
    for _ in range(100):
        log.note("step 3", lambda: "waiting for trainer 1")
        if len(caplog.records) > len(spoken):
            spoken.append(clock.now - 100.0)
        clock.now += 1.0
    assert spoken == [5.0, 10.0, 20.0, 40.0, 80.0]
    assert caplog.records[0].getMessage() == "waiting for trainer 1, for 5 s"
    assert caplog.records[0].levelno == logging.WARNING


def test_another_subject_is_another_wait(caplog):
    clock = Clock()
    log = WaitLog(clock)
    for second in range(40):
        log.note(f"step {second // 4}", lambda: "waiting")
        clock.now += 1.0
    assert caplog.records == []


def test_the_length_of_the_wait_is_known():
    clock = Clock()
    log = WaitLog(clock)
    assert log.note("x", str) == 0.0
    clock.now += 3.0
    assert log.note("x", str) == 3.0
    assert log.note(None, str) == 0.0
    clock.now += 3.0
    assert log.note("x", str) == 0.0


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("10.0.0.1:6174", ("10.0.0.1", 6174)),
        ("job-pserver-0.job:1", ("job-pserver-0.job", 1)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_an_endpoint_is_split_at_its_port(endpoint, expected):
    assert split_endpoint(endpoint) == expected


def test_ports_that_answer_are_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        wait_for_ports([f"127.0.0.1:{listening.getsockname()[1]}"], deadline_seconds=0.0)


def test_ports_that_never_answer_are_named():
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound, and nobody listens
        good, bad = (f"127.0.0.1:{each.getsockname()[1]}" for each in (listening, silent))
        with pytest.raises(DeadlineExceededError) as caught:
            wait_for_ports([good, bad], deadline_seconds=0.1)
    assert f"no connection to parameter server {bad} after 0.1 s" in str(caught.value)
    assert "refused" in str(caught.value)
    assert "FLEET_JOB_KEY" not in str(caught.value)  # without one a server would listen there all the same
    assert good not in str(caught.value)


def test_a_wait_for_ports_says_for_whom(caplog, monkeypatch):
    monkeypatch.setattr(waits, "FIRST_WORD_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineExceededError):
            wait_for_ports([endpoint], deadline_seconds=0.5)
    assert f"waiting for parameter server {endpoint} to listen (" in caplog.text


def test_a_wait_for_ports_looks_now_and_then_whether_it_is_needed(monkeypatch):
    monkeypatch.setattr(waits, "_POLL_SECONDS", 0.0)
    looks = list[int]()

    def look():
        looks.append(len(looks))
        if len(looks) == 3:
            raise SystemExit(0)

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(SystemExit):
            wait_for_ports([f"127.0.0.1:{silent.getsockname()[1]}"], 60.0, look)
    assert len(looks) == 3
