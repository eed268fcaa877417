"""The wheels of both distributions, installed where nothing else of this project is."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.recipes import recipes

ROOT = Path(__file__).parents[3]
UV = Path(sys.executable).parent / "uv"
SECONDS = 500  # torch takes seconds to start and minutes on a crowded machine

pytestmark = [
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what a run leaves"),
]

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def called(*command: str | Path, cwd: Path = ROOT, home: Path | None = None) -> str:
    """Run a command to its end, without ``PYTHONPATH`` and ``VIRTUAL_ENV``; return its output.

    With a `home`, it gets that folder and ``PATH``, and nothing else of this process's environment.
    """
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    if home is not None:
        environ = {"HOME": str(home), "PATH": environ["PATH"]}
    ended = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, f"{command}:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheels sdists` builds."""
    folder = tmp_path_factory.mktemp("clean") / "dist"
    called("make", "--no-print-directory", "wheels", "sdists", f"WHEELS={folder}")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty one: no cache, no configuration."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def python(dist: Path, home: Path) -> Path:
    """The interpreter of a new environment, into which pip has installed the two wheels as the README says.

    What the wheels need is there already, as links to the locked packages: pip would fetch gigabytes.
    """
    pip, verb, pattern = recipes()["install.sh"].split()
    assert (pip, verb) == ("pip", "install")
    wheels = sorted(dist.parent.glob(pattern))
    assert [wheel.name.partition("-")[0] for wheel in wheels] == ["fleet_operator", "fleet_trainer"]
    venv = dist.parent / "venv"
    called(sys.executable, "-m", "venv", venv, home=home)
    python: Path = venv / "bin" / "python"
    install = (UV, "pip", "install", "--offline", "--python", python)
    locks = [f"--requirements={ROOT / part / 'requirements.lock'}" for part in ("operator", "trainer_image")]
    called(*install, "--link-mode=symlink", "--require-hashes", *locks)
    # pip refuses what the locks do not have.
    called(python, "-m", "pip", "install", "--no-index", *wheels, cwd=dist.parent, home=home)
    share_bytecode(venv)
    return python


def share_bytecode(venv: Path) -> None:
    """Give an environment what is compiled here already: Python compiles anew what has another source."""
    ours = Path(sysconfig.get_path("purelib"))
    theirs = venv / ours.relative_to(sys.prefix)
    for compiled in ours.rglob("__pycache__/*.pyc"):
        shared = theirs / compiled.relative_to(ours)
        if shared.parents[1].is_dir() and not shared.exists():
            shared.parent.mkdir(exist_ok=True)
            shared.symlink_to(compiled)


def test_the_command_line_starts(python: Path, home: Path, tmp_path: Path):
    program = python.parent / "fleetjob"
    assert "Usage: fleetjob" in called(program, "--help", cwd=tmp_path, home=home)
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


def test_the_first_job_of_the_readme_trains_with_the_wheels(python: Path, home: Path, tmp_path: Path):
    shutil.copytree(ROOT / "examples" / "digits", tmp_path / "examples" / "digits")
    shutil.copy(ROOT / "Dockerfile", tmp_path)  # the folder with it is the project's root
    manifest = tmp_path / "examples" / "digits" / "fleetjob.yaml"
    run = ("sh", "-c", 'exec "$0" run -f "$1" 2>&1', python.parent / "fleetjob", manifest)
    output = called(*run, cwd=tmp_path, home=home)
    assert "Succeeded" in output
    started = output.index("trainer-1 has started")
    assert started < output.index("pserver-0 is ready")  # nobody waits until torch is imported


@pytest.mark.parametrize("name", ["fleet_operator", "fleet_trainer"])
def test_a_wheel_carries_licence_readme_and_classifiers_and_no_address(dist: Path, name: str):
    (wheel,) = dist.glob(f"{name}-*.whl")
    with zipfile.ZipFile(wheel) as content:
        (path,) = [each for each in content.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(content.read(path))
        licence = content.read(path.replace("METADATA", "licenses/LICENSE"))
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert str(metadata.get_payload()).startswith(f"# {name.replace('_', '-')}\n")
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier", [])
    assert metadata.get_all("Project-URL") is None
    assert "://" not in metadata.as_string()


def test_the_operators_wheel_carries_the_page_of_fleetjob_ui(dist: Path):
    (wheel,) = dist.glob("fleet_operator-*.whl")
    with zipfile.ZipFile(wheel) as content:
        files = set(content.namelist())
    assert {f"fleet_operator/cli/ui/{name}" for name in ("index.html", "ui.css", "ui.js")} <= files


@needs_compiler
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="it is the tag of wheels for x86-64")
def test_the_trainers_wheel_runs_on_every_linux_with_glibc(dist: Path):
    (wheel,) = dist.glob("fleet_trainer-*.whl")
    assert wheel.stem.endswith("py3-none-manylinux1_x86_64.manylinux_2_5_x86_64")


@pytest.mark.parametrize("name", ["fleet_operator", "fleet_trainer"])
def test_a_source_distribution_makes_the_same_wheel(dist: Path, name: str, tmp_path: Path):
    (sdist,) = dist.glob(f"{name}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    called(UV.parent / "hatchling", "build", "--target", "wheel", "--directory", tmp_path / "out", cwd=folder)
    (built,) = (tmp_path / "out").iterdir()
    (wheel,) = dist.glob(f"{name}-*.whl")
    with zipfile.ZipFile(built) as ours, zipfile.ZipFile(wheel) as theirs:
        files = sorted(each for each in theirs.namelist() if not each.endswith("/"))
        assert sorted(ours.namelist()) == files


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
