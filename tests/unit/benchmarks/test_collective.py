"""What the benchmark of collective training makes of its measurements, and what it measures."""

import json

import pytest

from benchmarks import collective
from benchmarks.systems import SYSTEMS


def test_what_a_system_is_of_ddp_is_taken_within_a_round():
    measured = {64: {"ddp": [1.0, 10.0], "allreduce": [2.0, 20.0]}}
    summary = collective.report(2, measured, steps=5)
    row = summary["batches"]["64"]["allreduce"]
    assert (row["of_ddp"]["median"], row["steps_per_second"]["median"]) == (2.0, 11.0)
    json.dumps(summary, allow_nan=False)


def test_every_system_is_known_and_has_no_servers():
    assert all(SYSTEMS[name].serve is None for name in collective.ABOUT)


@pytest.mark.parametrize(
    "flags",
    [
        ["--systems=fleet"],
        ["--systems=allreduce,allreduce"],
        ["--rounds=0"],
        ["--steps=0"],
        ["--batches=0"],
        ["--batches=1,1"],
        ["--trainers=2,x"],
    ],
)
def test_a_bad_flag_ends_before_anything_starts(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["collective", *flags])
    with pytest.raises(SystemExit) as ended:
        collective.main()
    assert ended.value.code == 2
    assert flags[0].partition("=")[0] in capsys.readouterr().err
