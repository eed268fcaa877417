"""Scripts that no job is around train alone, by the same bits as one trainer with one server."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.example_data import write_pictures, write_text
from tests.support.forked_python import ForkedPython
from tests.support.replicas import job

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = ROOT / ".venv-frameworks" / "bin" / "python"
WITH_SERVERS = {
    "ctr/train.py": ("--generate=3000", "--batch-size=200"),
    "deepfm/train.py": ("--generate=1500", "--batch-size=100"),
    "digits/train.py": ("--epochs", "2"),
    "distribute_ctr/train.py": ("--generate=3000", "--batch-size=200"),
    "quick_start/loop_ps.py": ("--steps=20",),
    "quick_start/program_ps.py": ("--steps=20",),
    "simnet_bow/train.py": ("--generate=1300", "--words=20000"),
    "word2vec/train.py": ("--words=1500", "--dimension=20", "--batch-size=500"),
}
COMPARED = ("ctr/train.py", "digits/train.py", "quick_start/loop_ps.py", "quick_start/program_ps.py")
"""Those that are compared with a job: a table, a data set, and both forms."""
TINY = ("--epochs=1", "--batch-size=4", "--width=8")
COLLECTIVE = {
    "bert/train.py": (*TINY, "--length=19", "--layers=1", "--heads=2"),
    "collective/train.py": ("--epochs=1",),
    "quick_start/loop_collective.py": ("--steps=20",),
    "quick_start/program_collective.py": ("--steps=20",),
    "resnet50/train.py": (*TINY, "--size=64", "--num-workers=0", "--layers", "1", "1", "1", "1"),
    "transformer/train.py": (*TINY, "--generate=42", "--test=10", "--layers=1", "--heads=2"),
}
DATA = {"bert/train.py": write_text, "resnet50/train.py": write_pictures}
SCRIPT = """
import hashlib
import torch
from fleet import nn
from fleet.parameter_server import fleet

fleet.init()
torch.manual_seed(0)
model = torch.nn.ModuleDict({
    "table": nn.DistributedEmbedding(2**40, 4, name="table"), "linear": torch.nn.Linear(4, 1)
})
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
if fleet.is_server():
    fleet.run_server()
else:
    fleet.init_worker()
    draw = torch.Generator().manual_seed(1)
    digest = hashlib.sha256()
    for _ in range(10):
        ids = torch.randint(2**40, (8,), generator=draw)
        optimizer.zero_grad()
        rows = model["table"](ids)
        loss = model["linear"](rows).square().mean()
        loss.backward()
        optimizer.step()
        digest.update(model["table"](ids).detach().numpy().tobytes())
    for parameter in model["linear"].parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print("digest:", digest.hexdigest(), fleet.is_server(), fleet.worker_index(), fleet.worker_num())
    fleet.stop_worker()
"""

BUILT = """
import numpy as np
from fleet import fluid
from fleet.parameter_server import fleet

fleet.init()
fluid.default_main_program().random_seed = fluid.default_startup_program().random_seed = 7
ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
rows = fluid.layers.embedding(ids, size=[40, 4], is_sparse=True)
loss = fluid.layers.mean(fluid.layers.square(fluid.layers.fc(rows, size=1) - 1.0))
fleet.distributed_optimizer(fluid.optimizer.Adagrad(0.1)).minimize(loss)
executor = fluid.Executor(fluid.CPUPlace())
if fleet.is_server():
    fleet.run_server()
else:
    START
    draw = np.random.default_rng(1)
    for _ in range(10):
        feed = {"ids": draw.integers(0, 40, (8, 1))}
        (found,) = executor.run(fleet.main_program, feed=feed, fetch_list=[loss])
        print("loss", float(found).hex())
    executor.close()
"""

NOTEBOOK = """
import nbclient, nbformat

cells = [nbformat.v4.new_code_cell(cell) for cell in {cells}]
made = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=100).execute()
for cell in made.cells:
    for output in cell.outputs:
        print(output.get("text", output))
"""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return an environment without any variable of a job, but with an address as in every pod."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return kept | {"TMPDIR": str(folder), "POD_IP": "10.0.0.7", "OMP_NUM_THREADS": "1"} | variables


def alone(folder: Path, script: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run a script without a job; return its exit status and its output."""
    log = folder / "alone.log"
    with log.open("wb") as output:
        env = environment(folder, **variables)
        process = ForkedPython(script, *arguments, env=env, output=output, errors=output)
        status = process.wait(200)
    return status, log.read_text()


def printed(output: str) -> list[str]:
    """Return what a script says of its training, without the runtime's log."""
    return re.findall(r"^(?:step|loss|test|accuracy|digest).*", output, re.MULTILINE)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", WITH_SERVERS)
def test_an_example_trains_as_one_trainer_with_one_server_does(name, tmp_path):
    script, arguments = EXAMPLES / name, WITH_SERVERS[name]
    status, output = alone(tmp_path, script, *arguments)
    assert status == 0, output
    assert "fleetjob run" in output
    assert "fleet.launch_ps" in output
    assert printed(output)
    if name not in COMPARED:
        return
    with job(tmp_path, servers=1, trainers=1, TMPDIR=str(tmp_path)) as made:
        (server,), (trainer,) = made.start(script, *arguments)
        trainer.expect(0)
        server.expect(0)
    assert printed(output) == printed(trainer.output)


def test_an_example_that_reads_its_role_itself_trains_without_one(tmp_path):
    status, output = alone(tmp_path, EXAMPLES / "fit_a_line" / "train.py")
    assert status == 0, output
    (error,) = re.findall(r"^test error: ([0-9.]+)", output, re.MULTILINE)
    assert float(error) < 0.6


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", COLLECTIVE)
def test_a_collective_example_trains_as_the_only_trainer(name, tmp_path):
    files = DATA[name](tmp_path / "data") if name in DATA else []
    status, output = alone(tmp_path, EXAMPLES / name, *files, *COLLECTIVE[name])
    assert status == 0, output
    assert "fleet.launch SCRIPT" in output


def test_tables_and_parameters_have_the_same_bits_as_with_a_server_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    status, output = alone(tmp_path, script)
    assert status == 0, output
    with job(tmp_path, servers=1, trainers=1) as made:
        (server,), (trainer,) = made.start(script)
        trainer.expect(0)
        server.expect(0)
    (found,) = printed(output)
    assert found.endswith("False 0 1")
    assert [found] == printed(trainer.output)


@pytest.mark.parametrize("start", ["executor.run(fleet.startup_program)", "fleet.init_worker()"])
def test_a_built_program_with_a_table_has_the_same_losses_as_with_a_server_process(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BUILT.replace("START", start))
    status, output = alone(tmp_path, script)
    assert status == 0, output
    with job(tmp_path, servers=1, trainers=1) as made:
        (server,), (trainer,) = made.start(script)
        trainer.expect(0)
        server.expect(0)
    assert len(printed(output)) == 10
    assert printed(output) == printed(trainer.output)


def test_a_script_that_stops_early_ends_at_once_with_its_own_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("optimizer.zero_grad()", "raise ValueError('of the script')"))
    status, output = alone(tmp_path, script)
    assert status == 1
    assert "ValueError: of the script" in output
    assert "FLAGS_rpc_deadline" not in output


@pytest.mark.parametrize("package", ["parameter_server", "collective"])
def test_a_job_that_lacks_a_variable_is_not_taken_for_none(package, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"from fleet.{package} import fleet\nfleet.init()\n")
    status, output = alone(tmp_path, script, PADDLE_TRAINERS_NUM="2")
    assert status == 2
    assert "is not set" in output


def test_a_debugger_stops_in_the_loop(tmp_path):
    script = EXAMPLES / "quick_start" / "loop_ps.py"
    step = next(n for n, line in enumerate(script.read_text().splitlines(), 1) if "optimizer.step()" in line)
    ask = "fleet.worker_num(), fleet.is_server(), loss.numel()"
    typed = (f"break {step}", "continue", ask, "clear 1", "continue", "quit")
    command = [sys.executable, "-m", "pdb", str(script), "--steps=20"]
    ended = subprocess.run(
        command,
        input="\n".join(typed),
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "(1, False, 1)" in ended.stdout, ended.stdout + ended.stderr
    assert "loss on other points" in ended.stdout


@pytest.mark.timeout(240)
@pytest.mark.skipif(not NOTEBOOKS.exists(), reason="`make .venv-frameworks/.installed` brings nbclient")
def test_a_notebook_trains_cell_by_cell(tmp_path):
    setup, loop = SCRIPT.split("if fleet.is_server():")
    cells = [setup, "fleet.init_worker()", loop.partition("fleet.init_worker()")[2]]
    cells = [textwrap.dedent(cell).strip() for cell in cells]
    runner = tmp_path / "notebook.py"
    runner.write_text(NOTEBOOK.format(cells=cells))
    ended = subprocess.run(
        [NOTEBOOKS, runner],
        env=environment(tmp_path) | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "False 0 1" in ended.stdout
    assert "it trains alone" in ended.stdout
