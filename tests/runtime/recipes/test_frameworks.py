"""Scripts for torchrun, Lightning and accelerate by the manifests of the page about one's own script."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.forked_python import ForkedPython
from tests.support.frameworks import FRAMEWORKS, ForkedFrameworks
from tests.support.local import LocalRun, forked
from tests.support.recipes import written

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 250  # torch takes seconds to start and minutes on a crowded machine

pytestmark = [
    pytest.mark.timeout(SECONDS + 50),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what a run leaves"),
]
installed = pytest.mark.skipif(
    not FRAMEWORKS.exists(), reason="`make .venv-frameworks/.installed` brings Lightning and accelerate"
)

LAUNCHED = ("accelerate-launch.yaml", 4)
TWO_PODS, TWO_PODS_OF_TWO_SLOTS = ("torchrun.yaml", 2), ("torchrun-slots.yaml", 4)


def trained(folder: Path, script: str, manifest: str, program: type[ForkedPython]) -> dict[str, str]:
    """Run a script of the page by a manifest of the page; return what each rank of all says at its end."""
    written(folder, script)
    by_name = {"torchrun": script.removesuffix(".py")} if manifest.startswith("torchrun") else {}
    job = yaml.safe_load(written(folder, manifest, **by_name).read_text())
    with LocalRun(folder, forked(job, program)) as run:
        assert run.wait(SECONDS) == 0, run.stderr
        assert run.result()["state"] == "Succeeded"
        said = "".join(log.read_text() for log in run.logs.glob("*.log"))
    # Two ranks of a pod share its log: what they print at once may stand in one line.
    return dict(re.findall(r"(rank \d of \d): (\[\[[^]]*\]\])", said))


@pytest.mark.parametrize(
    ("script", "program", "manifest", "size"),
    [
        pytest.param("torchrun.py", ForkedPython, *TWO_PODS_OF_TWO_SLOTS, id="plain"),
        pytest.param("train_lightning.py", ForkedFrameworks, *TWO_PODS, id="lightning", marks=installed),
        pytest.param("train_accelerate.py", ForkedFrameworks, *TWO_PODS, id="accelerate", marks=installed),
        pytest.param(
            "train_accelerate.py", ForkedFrameworks, *LAUNCHED, id="accelerate-launch", marks=installed
        ),
    ],
)
def test_all_ranks_train_one_model(
    tmp_path: Path, script: str, program: type[ForkedPython], manifest: str, size: int
):
    said = trained(tmp_path / "run", script, manifest, program)
    assert said.keys() == {f"rank {rank} of {size}" for rank in range(size)}
    (weight,) = set(said.values())
    weights = [float(each) for each in re.findall(r"[\d.]+", weight)]
    assert weights == pytest.approx([1.0] * 4, abs=0.05)
