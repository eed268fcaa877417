"""What the benchmark of collective training makes of its measurements, and what it measures."""

import json
import math

import pytest
import torch

from benchmarks import alone_systems, collective
from benchmarks.systems import SYSTEMS


def test_what_a_system_is_of_ddp_is_taken_within_a_round():
    measured = {64: {"ddp": [1.0, 10.0], "allreduce": [2.0, 20.0]}}
    summary = collective.report(2, measured, steps=5)
    row = summary["batches"]["64"]["allreduce"]
    assert (row["of_ddp"]["median"], row["steps_per_second"]["median"]) == (2.0, 11.0)
    json.dumps(summary, allow_nan=False)


def test_every_system_is_known_and_has_no_servers():
    assert all(SYSTEMS[name].serve is None for name in collective.ABOUT)


def test_what_one_trainer_takes_is_that_of_pytorch_alone_within_a_round(capsys):
    measured = {"plain": [10.0, 100.0], "ddp": [11.0, 110.0], "fleet": [12.0, 120.0]}
    summary = collective.report_alone("small", measured, steps=5)
    row = summary["ways"]["fleet"]
    assert (row["of_plain"]["median"], row["milliseconds"]["median"]) == (1.2, 66.0)
    json.dumps(summary, allow_nan=False)
    collective.show_alone(summary)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["fleet.collective", "66.00", "[22.80-109.20]", "1.20", "[1.20-1.20]"]


@pytest.mark.parametrize(
    ("name", "tensors", "numbers"), [("resnet", 161, 25_557_032), ("small", 1000, 36_000)]
)
def test_the_models_of_one_trainer_are_what_they_are_said_to_be(name, tensors, numbers):
    with torch.device("meta"):
        model, inputs, labels = alone_systems._workload(name, 2)
    shapes = [parameter.shape for parameter in model.parameters()]
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, numbers)
    assert len(inputs) == len(labels) == 2


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
