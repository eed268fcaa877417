from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleet_operator.startup import run_operator

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(
            {"FLEET_OPERATOR_WORKERS": "none"}, "FLEET_OPERATOR_WORKERS: found 'none'", id="setting"
        ),
        pytest.param({}, "set KUBECONFIG to a kubeconfig file", id="no-cluster"),
        pytest.param({"KUBECONFIG": "/nowhere"}, "cannot read the kubeconfig /nowhere", id="no-kubeconfig"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    environ: dict[str, str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_operator({"HOME": str(tmp_path), **environ}) == 2
    assert expected in capsys.readouterr().err
