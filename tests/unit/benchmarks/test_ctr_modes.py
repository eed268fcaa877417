"""What the command that trains an example in each mode says."""

import pytest

from benchmarks import ctr_modes


def test_each_mode_stands_beside_its_twin(capsys):
    modes = {"Async": {"auc": 0.7301, "twin": 0.7352, "batch_size_of_twin": 500}}
    ctr_modes.show({"lines": 100, "perfect": 0.8, "modes": modes})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "100 lines; AUC of a perfect model: 0.8000"
    assert lines[2] == "Async 0.7301 0.7352 -0.0051 500"


@pytest.mark.parametrize("flags", [["--modes=Other"], ["--modes=Geo,Geo"], ["--lines=0"], ["--batch-size=0"]])
def test_a_bad_flag_ends_before_anything_starts(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ctr_modes", *flags])
    with pytest.raises(SystemExit) as ended:
        ctr_modes.main()
    assert ended.value.code == 2
    assert flags[0].partition("=")[0] in capsys.readouterr().err
