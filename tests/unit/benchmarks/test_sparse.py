"""What the benchmark of tables makes of its measurements, and what it measures."""

import json

import pytest

from benchmarks import sparse
from benchmarks.sparse_systems import ROWS, SLOTS, id_batches
from benchmarks.systems import SYSTEMS


def test_ratios_are_taken_within_a_round():
    measured = {"communication": {"rowsrpc": [2.0, 20.0], "rows": [4.0, 20.0]}}
    summary = sparse.report(measured, steps=5)
    assert summary["ratios"]["communication"]["rows/rowsrpc"]["median"] == 1.5
    json.dumps(summary, allow_nan=False)


def test_every_system_is_known_and_described():
    assert set(sparse.NUM_SERVERS) == set(sparse.ABOUT)
    for name, num_servers in sparse.NUM_SERVERS.items():
        assert (SYSTEMS[name].serve is not None) is (num_servers > 0)


def test_trainers_have_batches_of_their_own_of_few_distinct_rows():
    one, other = id_batches(0)[0], id_batches(1)[0]
    assert one.shape == (1000, SLOTS)
    assert int(one.max()) < ROWS
    assert not one.equal(other)
    assert len(one.unique()) < one.numel() / 2


@pytest.mark.parametrize("flags", [["--systems=ddp"], ["--workloads=x"], ["--rounds=0"], ["--steps=0"]])
def test_a_bad_flag_ends_before_anything_starts(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sparse", *flags])
    with pytest.raises(SystemExit) as ended:
        sparse.main()
    assert ended.value.code == 2
    assert flags[0].partition("=")[0] in capsys.readouterr().err
