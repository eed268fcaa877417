"""Every folder in examples/ trains for real, some by the launchers, and is described truly."""

import difflib
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

from fleet_operator.api import parse_job
from tests.support.collective import ForkedTrainer, environments
from tests.support.forked_python import relay
from tests.support.processes import free_ports
from tests.support.replicas import job

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__")
MANIFESTS = sorted(EXAMPLES.glob("*/fleetjob*.yaml"))
WITH_DIGITS = {"argo", "kubeflow-pipelines"}
"""Those that train digits from elsewhere; tests/controlplane/test_workflows.py does."""
TWINS = sorted(path.parent.name for path in EXAMPLES.glob("*/single.py"))
"""Those that have a twin of one process."""
MAX_CHANGED_LINES = 10


def launch(module: str, *arguments: str, seconds: float = 200) -> str:
    """Run a launcher to its end from the root of the project; return its output, logs excluded."""
    command, environ = ["python", "-m", module, *arguments], os.environ | relay()
    ended = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def values(text: str, words: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{words}: ([0-9.]+)", text, re.MULTILINE)]


def start_port() -> str:
    return f"--start_port={free_ports(2)[0]}"


@pytest.mark.timeout(240)
def test_digits_learns_with_parameter_servers_and_data_loaders_that_fork(tmp_path):
    with job(tmp_path, servers=2, trainers=2, TMPDIR=str(tmp_path)) as made:
        servers, trainers = made.start(
            EXAMPLES / "digits" / "train.py", "--epochs", "6", "--num-workers", "2"
        )
        for replica in (*trainers, *servers):
            replica.expect(0, seconds=200)
    first, second = (values(trainer.output, "test accuracy") for trainer in trainers)
    assert first[0] >= 0.9
    assert second == first  # sync mode: both hold the same values


@pytest.mark.timeout(240)
@pytest.mark.parametrize("flag", ["--bf16", "--local-sgd=8"])
def test_collective_learns_by_averages(tmp_path, flag):
    script, started = EXAMPLES / "collective" / "train.py", []
    for index, environ in enumerate(environments(tmp_path, free_ports(2))):
        log = tmp_path / f"{index}.log"
        with log.open("wb") as output:
            everything = os.environ | environ
            trainer = ForkedTrainer(script, "--epochs=6", flag, env=everything, output=output, errors=output)
        started.append((trainer, log))
    try:
        for trainer, log in started:
            assert trainer.wait(200) == 0, log.read_text()
    finally:
        for trainer, _ in started:
            trainer.kill()
    first, second = (values(log.read_text(), "test accuracy") for _, log in started)
    assert first[0] >= 0.9
    assert second == first


def test_the_collective_example_gives_any_number_of_trainers_as_many_samples_each():
    example = runpy.run_path(str(EXAMPLES / "collective" / "train.py"))
    train, _ = example["load_data"]()
    for number in range(1, 20):
        shares = [example["share_of"](train, index, number) for index in range(number)]
        assert {len(share) for share in shares} == {len(train) // number}


@pytest.mark.timeout(240)
def test_a_plain_ddp_script_runs_unchanged():
    source = (EXAMPLES / "collective" / "ddp.py").read_text()
    assert "import fleet" not in source
    assert "from fleet" not in source
    (accuracy,) = values(
        launch("fleet.launch", "--worker_num=2", start_port(), "examples/collective/ddp.py"), "test accuracy"
    )
    assert accuracy >= 0.95


@pytest.mark.timeout(240)
def test_fit_a_line_learns_by_its_own_environment_variables(tmp_path):
    (port,) = free_ports(1, "127.0.0.2")
    endpoints = f"--endpoints=127.0.0.1:{port},127.0.0.2:{port}"
    launch("fleet.launch_ps", f"--log_dir={tmp_path}", endpoints, "examples/fit_a_line/train.py")
    (error,) = values((tmp_path / "workerlog.0").read_text(), "test error")
    assert error < 0.6


def changed_lines(folder: str) -> list[str]:
    """Return the lines of an example's train.py that single.py has not, blank ones aside."""
    single, train = (
        (EXAMPLES / folder / name).read_text().splitlines() for name in ("single.py", "train.py")
    )
    return [line[2:] for line in difflib.ndiff(single, train) if line.startswith("+ ") and line[2:].strip()]


@pytest.mark.parametrize("folder", TWINS)
def test_at_most_ten_lines_change(folder):
    changed = changed_lines(folder)
    assert len(changed) <= MAX_CHANGED_LINES, changed


@pytest.mark.parametrize("folder", TWINS)
def test_the_readme_shows_exactly_these_lines(folder):
    text = (EXAMPLES / folder / "README.md").read_text()
    diff = text.partition("```diff\n")[2].partition("```")[0]
    assert [
        line[1:] for line in diff.splitlines() if line.startswith("+") and line[1:].strip()
    ] == changed_lines(folder)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_example_is_described_and_has_a_manifest(folder):
    assert (folder / "fleetjob.yaml").is_file() or folder.name in WITH_DIGITS
    readme = (folder / "README.md").read_text()
    for name in re.findall(r"examples/[\w/.-]+\.(?:py|yaml)", readme):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_manifest_is_valid_and_runs_a_script_of_its_folder(path):
    parsed = parse_job(yaml.safe_load(path.read_text()) | {})
    assert parsed.metadata.name
    container = yaml.safe_load(path.read_text())["spec"]["template"]["spec"]["containers"][0]
    interpreter, script = container["command"]
    assert interpreter == "python"
    assert (ROOT / script).parent == path.parent
