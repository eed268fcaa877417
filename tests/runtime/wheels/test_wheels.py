"""The wheels of both distributions, installed where nothing else of this project is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.local import LocalRun, job_manifest
from tests.support.recipes import recipes

ROOT = Path(__file__).parents[3]
UV = Path(sys.executable).parent / "uv"
SECONDS = 200  # torch takes seconds to start and minutes on a crowded machine

pytestmark = [
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what a run leaves"),
]

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

TRAINING = """
import torch
import fleet as package
from fleet.parameter_server import fleet

fleet.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    inputs = torch.randn(64, 4)
    targets = inputs.sum(1, keepdim=True)
    for step in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    fleet.report(step=60, metrics={"last_loss": loss})
    fleet.stop_worker()
    print("trained by", package.__file__)
"""


def called(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command to its end, without what this process tells Python of its packages; return its output."""
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    ended = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, f"{command}:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the locked packages, as links, and the two wheels."""
    folder = tmp_path_factory.mktemp("clean")
    called("make", "--no-print-directory", "wheels", f"WHEELS={folder / 'dist'}")
    pip, verb, pattern = recipes()["install.sh"].split()
    assert (pip, verb) == ("pip", "install")
    wheels = sorted(folder.glob(pattern))
    assert [wheel.name.partition("-")[0] for wheel in wheels] == ["fleet_operator", "fleet_trainer"]
    called(UV, "venv", "--python", sys.executable, folder / "venv")
    python: Path = folder / "venv" / "bin" / "python"
    install = (UV, "pip", "install", "--offline", "--python", python)
    locks = [f"--requirements={ROOT / part / 'requirements.lock'}" for part in ("operator", "trainer_image")]
    called(*install, "--link-mode=symlink", "--require-hashes", *locks)
    called(*install, "--no-index", *wheels)  # refuses what the locks do not have
    return python


def test_the_command_line_starts(python: Path, tmp_path: Path):
    program = python.parent / "fleetjob"
    assert "Usage: fleetjob" in called(program, "--help", cwd=tmp_path)
    version = called(
        python, "-c", "from importlib.metadata import version; print(version('fleet-operator'))", cwd=tmp_path
    )
    assert called(program, "--version", cwd=tmp_path) == f"fleetjob {version}"


def test_the_package_is_the_wheels(python: Path, tmp_path: Path):
    imported = called(python, "-c", "import fleet; print(fleet.__file__)", cwd=tmp_path)
    package = Path(imported.strip()).parent
    assert package.is_relative_to(python.parents[1])
    assert (package / "py.typed").exists()
    assert (package / "typed.py").exists()  # or type checkers find no public name


def test_a_job_trains_where_the_repository_is_not(python: Path, tmp_path: Path):
    job = job_manifest(TRAINING, server=TRAINING, trainers=2)
    with LocalRun(tmp_path / "run", job, python=python) as run:
        assert run.wait(SECONDS) == 0, run.stderr
        assert run.result()["metrics"]["last_loss"] < 0.01
        assert f"trained by {python.parents[1]}" in run.log("trainer-1")


@pytest.mark.parametrize(
    ("compiler", "tag", "libraries"),
    [
        pytest.param("missing", "py3-none-any", 0, id="without-a-compiler"),
        pytest.param("cc", f"py3-none-linux_{os.uname().machine}", 1, id="with-one", marks=needs_compiler),
    ],
)
def test_a_wheel_says_whether_it_holds_what_was_compiled(compiler, tag, libraries, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    hatchling = UV.parent / "hatchling"
    called(hatchling, "build", "--target", "wheel", "--directory", tmp_path, cwd=ROOT / "trainer_image")
    (wheel,) = tmp_path.iterdir()
    assert wheel.stem.endswith(tag)
    with zipfile.ZipFile(wheel) as content:
        assert sum(name.endswith(".so") for name in content.namelist()) == libraries
