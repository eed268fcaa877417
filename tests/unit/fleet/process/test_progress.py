"""What a replica reports, and the snapshot of it."""

import json
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.process.progress import MAX_HISTORY, Progress


@pytest.fixture
def subject():
    return Progress(lambda: 0.0, lambda: 4096)


def test_what_was_never_reported_is_null(subject):
    assert subject.snapshot() == {
        "role": None,
        "index": None,
        "step": None,
        "totalSteps": None,
        "loss": None,
        "samples": None,
        "samplesPerSecond": None,
        "memoryBytes": 4096,
        "parameterBytes": None,
        "waitsFor": None,
        "metrics": {},
        "history": [],
        "counters": {},
        "tables": [],
    }


def test_reports_replace_and_counters_add(subject):
    subject.identify("TRAINER", 1)
    subject.report(step=1, total_steps=10, loss=0.5, samples=64)
    subject.report(step=2, loss=torch.tensor(0.25), samples=128, metrics={"test_accuracy": 0.9})
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
        "memoryBytes": 4096,
        "parameterBytes": None,
        "waitsFor": None,
        "metrics": {"test_accuracy": 0.9},
        "history": [[1, 0.5], [2, 0.25]],
        "counters": {"bytes_sent": 150},
        "tables": [],
    }


def test_a_replica_says_what_it_waits_for_and_a_server_what_it_holds(subject):
    subject.waits_for("pserver-1 to listen")
    subject.holds(800)
    told = subject.snapshot()
    assert (told["waitsFor"], told["parameterBytes"]) == ("pserver-1 to listen", 800)
    subject.waits_for(None)
    assert subject.snapshot()["waitsFor"] is None


def test_the_memory_is_that_of_this_process():
    assert (Progress().snapshot()["memoryBytes"] or 0) > 1 << 20


def test_of_many_tables_the_largest_are_told(subject):
    subject.show_tables(lambda: [{"name": str(each), "rows": 1, "bytes": each} for each in range(60)])
    assert [table["bytes"] for table in subject.snapshot()["tables"]] == list(range(59, 9, -1))


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


def test_a_loss_that_is_not_finite_is_said_once_and_never_breaks_json(subject, caplog):
    for step in range(3):
        subject.report(step=step, loss=float("nan"), metrics={"gap": float("inf")})
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
        ({"metrics": {"accuracy": None}}, "accuracy is 'None' (NoneType); expected one number"),
        ({"metrics": 0.97}, "metrics is 0.97; expected a mapping"),
        ({"metrics": {3: 1}}, "3 is not a valid metric name"),
        ({"metrics": {"a b": 1}}, "'a b' is not a valid metric name"),
    ],
)
def test_a_bad_report_names_the_argument_and_changes_nothing(subject, report, message):
    with pytest.raises(ConfigurationError) as error:
        subject.report(**report)
    assert message in str(error.value)
    assert subject.snapshot() == Progress(memory=lambda: 4096).snapshot()


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


INTERRUPTED = """
import os, signal
from fleet.process.progress import Progress

progress = Progress(memory=lambda: os.kill(os.getpid(), signal.SIGTERM))
signal.signal(signal.SIGTERM, lambda *_: progress.count("saves"))
progress.snapshot()
assert progress.snapshot()["counters"]["saves"] >= 1
"""


def test_a_signal_handler_may_report_while_the_main_thread_does():
    subprocess.run([sys.executable, "-c", INTERRUPTED], timeout=30, check=True)


def test_the_rate_follows_the_last_ten_seconds():
    clock = [0.0]
    subject = Progress(lambda: clock[0])
    for second in range(31):
        clock[0] = float(second)
        subject.report(samples=100 * second if second <= 20 else 2000 + 10 * (second - 20))
    assert subject.snapshot()["samplesPerSecond"] == pytest.approx(10.0)


@pytest.mark.parametrize("steps", [1, MAX_HISTORY - 1, MAX_HISTORY, 1000, 20_000])
def test_a_long_curve_is_thinned_evenly_and_keeps_both_ends(steps):
    subject = Progress()
    for step in range(steps):
        subject.report(step=step, loss=1.0 / (step + 1))
    history = subject.snapshot()["history"]
    assert len(history) <= MAX_HISTORY
    assert history[0] == [0, 1.0]
    assert history[-1] == [steps - 1, 1.0 / steps]
    gaps = {later[0] - earlier[0] for earlier, later in pairwise(history[:-1])}
    assert len(gaps) <= 1
    assert len(history) >= min(steps, MAX_HISTORY // 2)
