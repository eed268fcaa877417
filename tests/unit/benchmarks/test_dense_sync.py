"""What the dense benchmark makes of its measurements, and what it measures."""

import json

import pytest
from torch import nn

from benchmarks import dense_sync
from benchmarks.running import spread
from benchmarks.systems import SYSTEMS
from benchmarks.workload import NUM_PARAMETERS, batch, build_layers


def test_ratios_are_taken_within_a_round():
    measured = {
        64: {"ddp": [1.0, 10.0], "rpc-1": [2.0, 20.0], "fleet-1": [4.0, 20.0]},
        1: {"ddp": [5.0, 5.0], "rpc-1": [5.0, 5.0], "fleet-1": [20.0, 20.0]},
    }
    summary = dense_sync.report(measured, steps=5)
    assert summary["ratios"]["64"]["fleet-1/rpc-1"]["median"] == 1.5
    assert summary["ratios"]["64"]["fleet-1/ddp"]["median"] == 3.0
    assert summary["ratios"]["1"]["fleet-1/ddp"]["median"] == 4.0
    assert summary["ratios"]["all"]["fleet-1/ddp"]["median"] == 4.0
    assert set(summary["ratios"]["all"]) == {"fleet-1/rpc-1", "fleet-1/ddp"}
    assert (summary["rounds"], summary["steps_per_round"]) == (2, 5)
    json.dumps(summary, allow_nan=False)


def test_the_spread_is_that_of_the_rounds():
    assert spread([float(value) for value in range(11)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
    assert spread([3.0]) == {"median": 3.0, "p10": 3.0, "p90": 3.0}


def test_every_system_is_known_and_described():
    assert set(dense_sync.NUM_SERVERS) == set(dense_sync.ABOUT)
    for name, num_servers in dense_sync.NUM_SERVERS.items():
        assert (SYSTEMS[name.partition("-")[0]].serve is not None) is (num_servers > 0)


def test_the_workload_has_25_million_parameters():
    model = nn.Sequential(*build_layers())
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS == 25_129_960
    inputs, labels = batch(0)
    assert model(inputs).shape == (len(labels), 1000)


@pytest.mark.parametrize(
    "flags",
    [
        ["--systems=fleet-3"],
        ["--systems=ddp,ddp"],
        ["--rounds=0"],
        ["--steps=0"],
        ["--batches=0"],
        ["--batches=1,x"],
        ["--batches=65"],
    ],
)
def test_a_bad_flag_ends_before_anything_starts(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dense_sync", *flags])
    with pytest.raises(SystemExit) as ended:
        dense_sync.main()
    assert ended.value.code == 2
    assert flags[0].partition("=")[0] in capsys.readouterr().err
