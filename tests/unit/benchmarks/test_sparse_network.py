"""What the benchmark of tables on limited links makes of its measurements."""

import json

import pytest

from benchmarks import sparse_network
from benchmarks.cases import Case
from benchmarks.systems import SYSTEMS


def test_a_step_is_held_against_ids_and_rows_both_ways_over_the_payload_of_a_link():
    case = Case(2, 2, 400)
    assert sparse_network.limit_seconds(case, rows=10_000) == pytest.approx(10_000 * 96 / (50e6 * 0.956))
    found = sparse_network.report(case, {"rows": [0.04, 0.05]}, rows=9560 / 0.96 / 2, steps=2)
    assert found["limit_seconds"] == pytest.approx(0.01)
    assert found["systems"]["rows"]["of_limit"]["median"] == pytest.approx((0.25 + 0.2) / 2)
    json.dumps(found, allow_nan=False)


def test_a_table_shows_limit_and_goal(capsys):
    sparse_network.show(
        sparse_network.report(Case(2, 2, 400), {"rows": [0.04]}, rows=9560 / 0.96 / 2, steps=2)
    )
    title, ours = capsys.readouterr().out.splitlines()[:2]
    assert " ".join(title.split()) == "2+2@400: 4979 distinct rows a step limit s s/step of limit (goal 0.9)"
    assert " ".join(ours.split()) == "ours, sync 0.0100 0.0400 0.25 [0.25-0.25]"


def test_with_fewer_servers_than_trainers_a_servers_link_is_the_busiest():
    alone = sparse_network.most_rows(1, 1)
    assert 8000 < alone < 13_000
    assert sparse_network.most_rows(2, 1) == pytest.approx(2 * alone, rel=0.02)
    assert sparse_network.most_rows(2, 2) == pytest.approx(alone, rel=0.05)


def test_every_system_is_known_and_served():
    assert all(SYSTEMS[name].serve is not None for name in sparse_network.ABOUT)


@pytest.mark.parametrize(
    "flags", [["--systems=ddp"], ["--cases=2+2"], ["--cases=2+2@400x64"], ["--rounds=0"]]
)
def test_a_bad_flag_ends_before_anything_starts(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sparse_network", *flags])
    with pytest.raises(SystemExit) as ended:
        sparse_network.main()
    assert ended.value.code == 2
    assert flags[0].partition("=")[0] in capsys.readouterr().err
