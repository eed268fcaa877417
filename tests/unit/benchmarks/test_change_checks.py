"""What the benchmark of change checks says of its rounds, and what its trainer counts."""

from benchmarks.change_checks import summary
from benchmarks.checked_trainer import Counted


def test_the_share_is_taken_within_each_round():
    rounds = [
        {"step": 0.010, "checks": 0.0001},
        {"step": 0.020, "checks": 0.0001},
        {"step": 0.010, "checks": 0.0003},
    ]
    assert summary("tcp", rounds) == "tcp: a step takes 10.00 ms, of which checks 100 us: 1.00 % [0.50-3.00]"


def test_what_is_called_within_something_counted_is_counted_once(monkeypatch):
    times = iter([0.0, 5.0])
    monkeypatch.setattr("benchmarks.checked_trainer.time.perf_counter", lambda: next(times))
    counted = Counted()
    inner = counted.around(lambda: 1)
    assert counted.around(lambda: inner() + 1)() == 2
    assert counted.seconds == 5.0
