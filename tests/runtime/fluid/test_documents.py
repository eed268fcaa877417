"""The scripts of the original's documents train here once their import lines are changed.

They are kept as they stand in the documents, and the page on Paddle says what becomes of an import line.
Where a script names a GPU, tests without one put the CPU in its place.
"""

import os
import re
import runpy
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from fleet import fluid
from tests.support.forked_python import ForkedPython, relay
from tests.support.processes import free_ports

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = Path(__file__).parents[3] / "docs" / "paddle.md"
IMPORTS = dict(
    re.findall(r"^\| `((?:from|import) .*)` \| `((?:from|import) .*)` \|$", PAGE.read_text(), re.M)
)
UNTRAINED = 0.69  # of two classes, each as likely
SERVERS = ("127.0.0.1", "127.0.0.2")


def script(name: str, folder: Path, *, on_gpu: bool = False) -> Path:
    """Write a script and what it imports into a folder, with other import lines; return its path."""
    for source in {name, "nets", "utils"}:
        text = (SCRIPTS / f"{source}.txt").read_text()
        lines = [IMPORTS.get(line, line) for line in text.split("\n")]
        assert not [line for line in lines if re.match(r"(from|import) paddle", line)]
        text = "\n".join(lines)
        (folder / f"{source}.py").write_text(text if on_gpu else text.replace("CUDAPlace(0)", "CPUPlace()"))
    return folder / f"{name}.py"


def environment(**variables: object) -> dict[str, str]:
    """Return the environment of a process: this one's, and some variables."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}


def costs(printed: str) -> list[float]:
    return [float(cost) for cost in re.findall(r"cost ?= ?([0-9.]+)$", printed, re.M)]


def together(path: Path, roles: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Run a script as several processes; return what each printed, once all have ended with 0."""
    logs = {name: path.with_suffix(f".{number}.log") for number, name in enumerate(roles)}
    processes = {}
    try:
        for name, variables in roles.items():
            with logs[name].open("wb") as output:
                processes[name] = ForkedPython(
                    path, env=environment(**variables), output=output, errors=output, cwd=path.parent
                )
        statuses = {name: process.wait(150) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    printed = {name: log.read_text() for name, log in logs.items()}
    assert statuses == dict.fromkeys(roles, 0), printed
    return printed


@pytest.mark.parametrize(
    "on_gpu",
    [
        pytest.param(False, id="cpu"),
        pytest.param(
            True,
            id="gpu",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
        ),
    ],
)
def test_the_quick_start_trains_in_one_process(on_gpu: bool, tmp_path: Path):
    path = script("local_trainer", tmp_path, on_gpu=on_gpu)
    found = costs(together(path, {"trainer": {}})["trainer"])
    assert len(found) == 1001
    assert sum(found[-10:]) / 10 < UNTRAINED - 0.02


def launched(arguments: list[str], folder: Path) -> list[list[float]]:
    """Run a launcher in a folder; return the costs in each worker's log."""
    run = subprocess.run(
        ["python", "-m", *arguments],
        env=environment(**relay()),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    logs = {path.name: path.read_text() for path in sorted(folder.rglob("*log.*"))}
    assert run.returncode == 0, (run.stderr, logs)
    return [costs(text) for name, text in logs.items() if name.startswith("workerlog")]


def test_launch_ps_trains_the_quick_start(tmp_path: Path):
    path = script("distributed_train", tmp_path)
    port, *_ = free_ports(2)
    workers = launched(["fleet.launch_ps", "--start_port", str(port), path.name], tmp_path)
    assert [len(found) for found in workers] == [1001, 1001]
    for found in workers:
        assert sum(found[-10:]) / 10 < UNTRAINED - 0.02


def test_launch_trains_the_quick_start_collectively(tmp_path: Path):
    path = script("collective_train", tmp_path)
    port, *_ = free_ports(2)
    flags = ["--nproc_per_node", "2", "--started_port", str(port), "--log_dir", "logs"]
    workers = launched(["fleet.launch", *flags, path.name], tmp_path)
    assert [len(found) for found in workers] == [1001, 1001]
    for found in workers:
        assert sum(found[-10:]) / 10 < UNTRAINED - 0.02


def test_fit_a_line_trains_by_its_seven_variables(tmp_path: Path):
    (port,) = free_ports(1)
    common = {"PADDLE_PSERVER_IPS": ",".join(SERVERS), "PADDLE_PSERVER_PORT": port, "PADDLE_TRAINERS": 2}
    servers = {ip: {**common, "PADDLE_TRAINING_ROLE": "PSERVER", "PADDLE_CURRENT_IP": ip} for ip in SERVERS}
    trainers = {
        str(index): {**common, "PADDLE_TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": index}
        for index in range(2)
    }
    printed = together(script("dist_train", tmp_path), servers | trainers)
    for index in trainers:
        losses = [
            float(loss)
            for loss in re.findall(r"^Epoch: \d+, Batch: \d+, loss: ([0-9.]+)$", printed[index], re.M)
        ]
        assert len(losses) == 30 * 4  # 353 samples make 45 batches
        assert sum(losses[-8:]) < sum(losses[:8]) / 2


@pytest.fixture
def apart() -> Iterator[None]:
    """Build on programs of the test's own."""
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.unique_name.guard():
        yield


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("role", ["PSERVER", "TRAINER"])
def test_the_sample_of_the_transpiler_makes_programs(role: str, tmp_path: Path):
    path = script("transpile_pserver", tmp_path)
    path.write_text(path.read_text().replace('role = "PSERVER"', f'role = "{role}"'))
    made = runpy.run_path(str(path))
    if role == "PSERVER":
        (op,) = made["pserver_program"].global_block().ops
        assert op.type == "listen_and_serv"
        assert made["pserver_startup_program"].global_block().ops
    else:
        types = [op.type for op in made["trainer_program"].global_block().ops]
        assert "send" in types
        assert "sgd" not in types


@pytest.mark.usefixtures("apart")
def test_the_sample_of_nccl2_makes_a_program(tmp_path: Path):
    path = script("transpile_nccl2", tmp_path)
    path.write_text(path.read_text().replace("use_cuda=True", f"use_cuda={torch.cuda.is_available()}"))
    made = runpy.run_path(str(path))
    assert made["exe"].device_count == 1
    startup = fluid.default_startup_program()
    assert "gen_nccl_id" in [op.type for op in startup.global_block().ops]


def test_role_makers_that_a_script_defines(tmp_path: Path):
    endpoints = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    roles = {
        f"{kind} {index}": {"PSERVERS": endpoints, "WORKER_NUM": 2, "IS_WORKER": kind, "CURRENT_ID": index}
        for kind in (0, 1)
        for index in range(2)
    }
    printed = together(script("user_defined_role", tmp_path), roles)
    assert [len(costs(printed[f"1 {index}"])) for index in range(2)] == [1, 1]
