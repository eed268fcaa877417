"""TorchRec's DLRM with our collection in the place of TorchRec's, in an environment of its own.

Not among the tests of ``make test``: ``make test-torchrec`` makes the environment, and runs this.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.local import LocalRun

TORCHREC = Path(__file__).parents[2] / ".venv-torchrec" / "bin" / "python"
SCRIPT = Path(__file__).with_name("dlrm.py")
SECONDS = 250  # torch takes seconds to start and minutes on a crowded machine


def manifest() -> dict[str, object]:
    """Return a job of one server and two trainers, all of which run the script."""
    container = {"name": "fleet", "image": "none", "command": ["python", "-W", "ignore", str(SCRIPT)]}
    return {
        "apiVersion": "fleetjob.dev/v1alpha1",
        "kind": "FleetJob",
        "metadata": {"name": "dlrm"},
        "spec": {
            "mode": "ParameterServer",
            "pserver": {"replicas": 1},
            "trainer": {"replicas": 2},
            "runPolicy": {"backoffLimit": 0},
            "template": {"spec": {"containers": [container]}},
        },
    }


@pytest.mark.timeout(SECONDS + 50)
def test_a_model_of_torchrec_trains_to_the_same_values_with_our_collection(tmp_path: Path):
    with LocalRun(tmp_path, manifest(), python=TORCHREC) as run:
        assert run.wait(SECONDS) == 0, run.stderr
        for trainer in range(2):
            assert "equal after 2 steps" in run.log(f"trainer-{trainer}")
