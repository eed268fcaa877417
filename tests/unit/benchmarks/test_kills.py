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


def test_a_life_that_began_with_a_half_made_step_counts_once(tmp_path):
    lives = [
        f"trainer {trainer} (attempt {attempt}) receives the values of step 5, which 2 of 4 blocks"
        for trainer, attempt in ((1, 1), (1, 2), (0, 2))
    ]
    logs = ["\n".join(lives), lives[0]]
    assert half_made([log_of(text, tmp_path / f"{number}") for number, text in enumerate(logs)]) == 3


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
