"""The last words: what fits into a termination message, and who has the last say."""

import json
from typing import Any

import pytest

from fleet.process import termination
from fleet.process.progress import Progress


def long_state(metrics: int = 0, counters: int = 0) -> dict[str, Any]:
    subject = Progress()
    for step in range(5000):
        subject.report(step=step, total_steps=5000, loss=2.302585092994046 / (step + 1), samples=64 * step)
    for i in range(metrics):
        subject.report({f"metric_{i}": i / 3})
    for i in range(counters):
        subject.count(f"a_counter_with_a_long_name_{i}", 123456789)
    return subject.snapshot()


def test_a_long_run_fits_with_64_points_and_both_ends():
    text = termination.progress_message(long_state())
    assert "\n" not in text
    assert len(text) <= termination.MAX_PROGRESS_BYTES
    history = json.loads(text)["history"]
    assert len(history) == termination.MAX_HISTORY
    assert (history[0][0], history[-1][0]) == (0, 4999)


@pytest.mark.parametrize(("metrics", "counters"), [(60, 0), (0, 60), (200, 0), (200, 200)])
def test_what_is_too_long_loses_points_then_counters_then_metrics(metrics, counters):
    text = termination.progress_message(long_state(metrics, counters))
    assert len(text) <= termination.MAX_PROGRESS_BYTES
    state = json.loads(text)
    assert (state["step"], state["totalSteps"]) == (4999, 5000)
    assert len(state["metrics"]) == (metrics if metrics < 200 else 0)


def test_tables_are_told_last_too_if_they_fit():
    def told(length: int) -> Any:
        subject = Progress()
        subject.report(loss=1, metrics={"auc": 0.5})
        subject.count("non_finite_parameters")
        subject.show_tables(lambda: [{"name": "t" * length, "rows": 1, "bytes": each} for each in range(20)])
        state = json.loads(termination.progress_message(subject.snapshot()))
        assert (len(state["counters"]), len(state["metrics"])) == (1, 1)
        return state["tables"]

    assert [table["bytes"] for table in told(10)] == list(range(19, 9, -1))
    assert told(1000) == []


@pytest.fixture
def words(tmp_path):
    return tmp_path / "words"


def test_the_first_failure_has_the_last_say(words):
    environ = {"FLEET_TERMINATION_LOG": str(words)}
    termination.write_progress(Progress().snapshot(), environ)
    assert json.loads(words.read_text())["step"] is None
    termination.write_failure("trainer 0: it broke\nin two lines", environ)
    termination.write_failure("trainer 1: trainer 0 is gone", environ)
    assert words.read_text() == "trainer 0: it broke in two lines\n"


def test_a_message_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    termination.write_failure("why", {"FLEET_TERMINATION_LOG": str(tmp_path / "no" / "folder")})
    assert "could not be written" in caplog.text


def test_without_a_place_there_is_no_message(monkeypatch, tmp_path):
    monkeypatch.setattr(termination, "KUBELET_PATH", tmp_path / "absent")
    assert termination.message_path({}) is None
    (tmp_path / "absent").touch()
    assert termination.message_path({}) == tmp_path / "absent"


def test_a_server_says_after_how_many_restarts_each_trainer_has_completed_unless_that_is_too_long():
    few = termination.completed_trainers([0, 1, 2], {0: 0, 1: 2, 2: 0})
    assert few == {"completedTrainers": "0-2", "completedAfter": {"0": "0,2", "2": "1"}}
    many = termination.completed_trainers(range(1000), {each: each for each in range(1000)})
    assert many == {"completedTrainers": "0-999"}
    assert termination.completed_trainers([1], {}) == {"completedTrainers": "1"}
