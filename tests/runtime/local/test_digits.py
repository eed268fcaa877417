"""The example with real training, as ``make demo`` runs it, and with replicas killed meanwhile.

Its processes are forked here; the tests of the wheels start them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.local import LocalRun, forked, job_manifest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "digits" / "fleetjob.yaml"

SECONDS = 300  # torch takes seconds to start and minutes on a crowded machine

pytestmark = [
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
]


# Trains until it finds `done` in the run's folder, and never tells anybody how far it is.
SILENT = """
import pathlib, time, torch
from fleet.{package} import fleet
fleet.init()
model = torch.nn.Linear(2, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    raise SystemExit
fleet.init_worker()
while not pathlib.Path("done").exists():
    time.sleep(0.02)
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
print("made", fleet.step)
fleet.stop_worker()
"""


# Runs the example, and stops after each report until it finds `resume` in the run's folder.
HELD = """
import pathlib, runpy, sys, time
from fleet.parameter_server import fleet
report = fleet.report
def report_and_hold(*values, **named):
    report(*values, **named)
    while not pathlib.Path("resume").exists():
        time.sleep(0.02)
fleet.report = report_and_hold
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def held_digits() -> dict[str, Any]:
    """Return the example, held in the middle of training so that a replica can be killed there."""
    job: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    job["spec"] |= {"pserver": {"replicas": 1}, "trainer": {"replicas": 2}}
    script = str(ROOT / "examples" / "digits" / "train.py")
    command = ["python", "-c", HELD, script, "--epochs", "30"]
    job["spec"]["template"]["spec"]["containers"][0]["command"] = command
    return forked(job)


def exit_codes(run: LocalRun) -> dict[str, list[int]]:
    return {f"{each['role']}-{each['index']}": each["exit_codes"] for each in run.result()["replicas"]}


def test_digits_trains_from_its_manifest(tmp_path):
    job: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    job["spec"]["template"]["spec"]["containers"][0]["workingDir"] = str(ROOT)
    with LocalRun(tmp_path / "run", forked(job)) as run:
        assert run.wait(SECONDS) == 0, run.stderr
        result = run.result()
        assert result["state"] == "Succeeded"
        assert result["metrics"]["test_accuracy"] >= 0.95
        assert exit_codes(run) == {"pserver-0": [0], "pserver-1": [0], "trainer-0": [0], "trainer-1": [0]}
        assert all(each["restarts"] == 0 for each in result["replicas"])
        assert "warning" not in run.stderr
        said = {name: run.log(name).splitlines()[1:] for name in exit_codes(run)}
        server, trainer = "\n".join(said["pserver-0"]), "\n".join(said["trainer-1"])
        assert re.search(
            r"parameter server \S+:6174 serves \d+ blocks of \d+ parameters \(\d+ values\) in mode sync;"
            r" waiting for trainers 0 and 1 to join\n",
            server,
        )
        for index in (0, 1):
            assert f"trainer {index} joined at step 0\n" in server
            assert f"trainer {index} has completed, at step 660\n" in server
        assert server.endswith("every trainer has completed, at step 660")
        assert re.match(
            r"trainer 1 joined parameter servers \S+:6174 and \S+:6174 at step 0 with \d+ blocks of 6"
            r" parameters \(\d+ values\) in mode sync\ntrainer 1 has completed, at step 660\ntest accuracy",
            trainer,
        )
        assert all(len(lines) <= 12 for lines in said.values()), "the log of each step"
        assert (run.logs / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("package", ["parameter_server", "collective"])
def test_the_runtimes_step_is_shown_of_a_script_that_reports_nothing(tmp_path, package):
    script = SILENT.format(package=package)
    if package == "parameter_server":
        job = job_manifest(script, server=script, syncMode="Geo")
    else:
        job = job_manifest(script, server=None)
    with LocalRun(tmp_path / "run", forked(job)) as run:
        assert re.search(r"trainer-0 step [1-9]\d*$", run.says("trainer-0 step", SECONDS))
        (run.folder / "done").touch()
        assert run.wait(SECONDS) == 0, run.stderr
        assert "NaN" not in run.log("trainer-0")
        if package == "parameter_server":  # the manifest asks for the mode
            assert "in mode geo" in run.log("pserver-0")


def test_a_killed_trainer_joins_again_and_the_job_succeeds(tmp_path):
    with LocalRun(tmp_path / "run", held_digits()) as run:
        run.says("trainer-1 step", SECONDS)
        run.kill("trainer-1")
        (run.folder / "resume").touch()
        line = run.says("trainer-1 was ended by SIGKILL (exit code 137)")
        assert "restarting (1 of 6)" in line
        assert run.wait(SECONDS) == 0, run.stderr
        assert run.result()["metrics"]["test_accuracy"] >= 0.95
        ended_well = {"pserver-0": [0], "trainer-0": [0]}
        assert exit_codes(run) == ended_well | {"trainer-1": [137, 0]}
        assert "after the others completed" not in run.log("trainer-1") + run.log("pserver-0")
