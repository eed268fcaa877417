"""What the benchmark of click-through rates makes of its measurements, and what it measures."""

import json

import pytest

from benchmarks import ctr
from benchmarks.systems import SYSTEMS


def test_each_number_of_trainers_is_held_against_torch_within_a_round(capsys):
    summary = ctr.report(
        {"ctrtorch": [100.0, 200.0], "ctr-1": [50.0, 120.0], "ctrasync-4": [300.0, 500.0]}, 5
    )
    assert summary["to_torch"]["ctr-1"]["median"] == pytest.approx(0.55)
    json.dumps(summary, allow_nan=False)
    ctr.show(summary)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1].startswith("PyTorch alone, one process 150 110 190 1.00")
    assert lines[2].startswith("ours, sync, 1 trainer 85")
    assert lines[3].startswith("ours, async, 4 trainers 400")


def test_every_system_is_known():
    assert SYSTEMS[ctr.ALONE].serve is None
    assert all(SYSTEMS[name].serve is not None for name in ctr.ABOUT)


@pytest.mark.parametrize("flags", [["--systems=ddp"], ["--trainers=0"], ["--trainers=1,1"], ["--steps=0"]])
def test_a_bad_flag_ends_before_anything_starts(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ctr", *flags])
    with pytest.raises(SystemExit) as ended:
        ctr.main()
    assert ended.value.code == 2
    assert flags[0].partition("=")[0] in capsys.readouterr().err
