"""What the benchmark of kills reads from logs, and how it prints."""

from types import SimpleNamespace
from typing import Any, cast

from benchmarks.kills import half_made, show, steps_made
from tests.support.replicas import Replica


def log_of(text: str, path: Any) -> Replica:
    """Return a replica that has written this."""
    path.write_text(text)
    return Replica("any", cast("Any", SimpleNamespace()), path)


def test_the_last_step_that_was_written_whole_counts(tmp_path):
    assert steps_made(log_of("", tmp_path / "a")) == 0
    assert steps_made(log_of("made step 9\nmade step 10\nmade step 11", tmp_path / "b")) == 10


def test_an_attempt_that_servers_let_join_at_different_steps_has_met_a_half_made_one(tmp_path):
    first = "trainer 1 joined again (attempt 1) at step 5\ntrainer 1 joined again (attempt 2) at step 8\n"
    second = "trainer 1 joined again (attempt 1) at step 6\ntrainer 1 joined again (attempt 2) at step 8\n"
    assert half_made([log_of(first, tmp_path / "a"), log_of(second, tmp_path / "b")]) == 1


def test_the_summary_is_a_table(capsys):
    row = {
        "optimizer": "adam",
        "trainers_killed": 120,
        "servers_killed": 80,
        "came_back_to_half_made_steps": 31,
        "jobs": 20,
        "jobs_with_other_bits": 0,
    }
    show({"rows": [row]})
    assert capsys.readouterr().out.splitlines()[-1].split() == ["adam", "120", "80", "31", "20", "0"]
