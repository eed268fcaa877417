"""What a replica reports, and how it reads from outside."""

import contextlib
import json
import os
import socket
import threading
import urllib.error
import urllib.request
from itertools import pairwise

import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.process import progress
from fleet.process.half_open import HalfOpen
from fleet.process.progress import MAX_HISTORY, Progress, prometheus_text
from tests.support.processes import wait_for


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def subject(clock):
    return Progress(lambda: clock[0])


def test_what_was_never_reported_is_null(subject):
    assert subject.snapshot() == {
        "role": None,
        "index": None,
        "step": None,
        "totalSteps": None,
        "loss": None,
        "samples": None,
        "samplesPerSecond": None,
        "metrics": {},
        "history": [],
        "counters": {},
    }


def test_reports_replace_and_counters_add(subject):
    subject.identify("TRAINER", 1)
    subject.report(step=1, total_steps=10, loss=0.5, samples=64)
    subject.report(step=2, loss=torch.tensor(0.25), samples=128, test_accuracy=0.9)
    subject.count("bytes_sent", 100)
    subject.count("bytes_sent", 50)
    assert subject.snapshot() == {
        "role": "TRAINER",
        "index": 1,
        "step": 2,
        "totalSteps": 10,
        "loss": 0.25,
        "samples": 128,
        "samplesPerSecond": None,
        "metrics": {"test_accuracy": 0.9},
        "history": [[1, 0.5], [2, 0.25]],
        "counters": {"bytes_sent": 150},
    }


def test_the_step_of_the_runtime_counts_until_the_script_reports_one(subject):
    made = [0]
    subject.follow(lambda: made[0])
    assert subject.snapshot()["step"] is None
    made[0] = 3
    subject.report(loss=0.5)
    assert subject.snapshot()["step"] == 3
    made[0] = 0  # the trainer is gone
    assert subject.snapshot()["step"] == 3
    subject.report(step=40)
    made[0] = 5
    state = subject.snapshot()
    assert (state["step"], state["history"]) == (40, [[3, 0.5]])


def test_the_rate_follows_the_last_ten_seconds(subject, clock):
    for second in range(31):
        clock[0] = float(second)
        subject.report(samples=100 * second if second <= 20 else 2000 + 10 * (second - 20))
    assert subject.snapshot()["samplesPerSecond"] == pytest.approx(10.0)


@pytest.mark.parametrize("steps", [1, MAX_HISTORY - 1, MAX_HISTORY, 1000, 20_000])
def test_a_long_curve_is_thinned_evenly_and_keeps_both_ends(subject, steps):
    for step in range(steps):
        subject.report(step=step, loss=1.0 / (step + 1))
    history = subject.snapshot()["history"]
    assert len(history) <= MAX_HISTORY
    assert history[0] == [0, 1.0]
    assert history[-1] == [steps - 1, 1.0 / steps]
    gaps = {later[0] - earlier[0] for earlier, later in pairwise(history[:-1])}
    assert len(gaps) <= 1
    assert len(history) >= min(steps, MAX_HISTORY // 2)


def test_a_loss_that_is_not_finite_is_said_once_and_never_breaks_json(subject, caplog):
    for step in range(3):
        subject.report(step=step, loss=float("nan"), gap=float("inf"))
    state = subject.snapshot()
    assert (state["loss"], state["metrics"], state["history"]) == (None, {"gap": None}, [])
    json.dumps(state, allow_nan=False)
    assert [record.getMessage() for record in caplog.records] == ["the reported loss is nan at step 0"]


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"step": 1.5}, "step is 1.5 (float); expected a whole number, 0 or more"),
        ({"step": True}, "step is True (bool); expected a whole number"),
        ({"samples": -1}, "samples is -1; expected a whole number, 0 or more"),
        ({"total_steps": "10"}, "total_steps is '10' (str); expected a whole number"),
        ({"loss": "low"}, "loss is 'low' (str); expected one number"),
        ({"loss": torch.zeros(2)}, "(Tensor); expected one number"),
        ({"accuracy": None}, "accuracy is 'None' (NoneType); expected one number"),
        ({"a b": 1}, "'a b' is no name for a metric"),
    ],
)
def test_a_bad_report_names_the_argument_and_changes_nothing(subject, report, message):
    with pytest.raises(ConfigurationError) as error:
        subject.report(**report)
    assert message in str(error.value)
    assert subject.snapshot() == Progress().snapshot()


def test_threads_lose_no_count(subject):
    def add() -> None:
        for _ in range(5000):
            subject.count("retries")

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert subject.snapshot()["counters"] == {"retries": 20_000}


def test_prometheus_text(subject):
    subject.identify("PSERVER", 0)
    subject.report(step=3, loss=0.5, test_accuracy=0.9)
    subject.count("bytes_sent", 7)
    text = prometheus_text(subject.snapshot(), {"FLEET_JOB_NAME": 'a"b', "FLEET_RESTARTS": "2"})
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == [
        r'fleet_replica_info{job="a\"b",role="PSERVER",index="0",attempt="2"} 1',
        "fleet_step 3",
        "fleet_loss 0.5",
        'fleet_metric{name="test_accuracy"} 0.9',
        "fleet_bytes_sent_total 7",
    ]
    assert text.count("# TYPE") == len(lines)
    assert text.endswith("\n")


@pytest.fixture
def address():
    host, port = progress.start_server("127.0.0.1", 0)
    yield f"http://{host}:{port}"
    progress.close()


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
    monkeypatch.setattr(progress._Handler, "timeout", 60.0)
    before = threading.active_count()
    with contextlib.ExitStack() as opened:
        for _ in range(300):
            slow = opened.enter_context(socket.create_connection(progress.start_server("", 0), 10))
            slow.sendall(b"G")
        assert get(f"{address}/healthz")[1] == "ok\n"  # the last in line, so all have come in
        wait_for(lambda: threading.active_count() - before < 3 * 64, "the oldest to be given up")


def test_a_reader_has_a_deadline_as_a_whole(address, monkeypatch):
    """One byte after the other, each well before the next time-out, is no way to stay."""
    assert progress._server is not None
    monkeypatch.setattr(progress._server, "_readers", HalfOpen(seconds=0.5))
    with socket.create_connection(progress.start_server("", 0), timeout=0.1) as slow:
        for byte in b"GET /progress HTTP/1.0":
            with contextlib.suppress(TimeoutError):  # 0.1 s, unless it has closed
                slow.sendall(bytes([byte]))
                assert slow.recv(1) == b""
                return
    pytest.fail("the server still listens to it")


def test_a_second_start_returns_the_first_address(address):
    host, port = progress.start_server("127.0.0.1", 0)
    assert address == f"http://{host}:{port}"


def test_a_forked_child_does_not_hold_the_parents_port():
    _, port = progress.start_server("127.0.0.1", 0)
    released, told = os.pipe()
    child = os.fork()
    if child == 0:  # lives until the parent has looked
        os.close(told)
        os.read(released, 1)
        os._exit(0)
    try:
        os.close(released)
        progress.close()
        with pytest.raises(urllib.error.URLError, match="refused"):
            get(f"http://127.0.0.1:{port}/healthz")
    finally:
        os.close(told)
        os.waitpid(child, 0)
