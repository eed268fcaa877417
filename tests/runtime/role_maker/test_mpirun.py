"""MPISymmetricRoleMaker under a real mpirun: every rank of a job finds its role, and the job trains."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MPIRUN = shutil.which("mpirun")
SAY = """
import os, sys

def say(text):  # to a file, because mpirun mixes what its ranks write
    with open(f"{sys.argv[1]}/rank-{os.environ['OMPI_COMM_WORLD_RANK']}", "a") as file:
        print(text, file=file)

"""
TRAIN = """
import torch
from fleet import role_maker
from fleet.parameter_server import fleet

fleet.init(role_maker.MPISymetricRoleMaker())
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
if fleet.is_server():
    say(f"server {fleet.server_index()} of {fleet.server_num()} for {fleet.worker_num()}")
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
    total = fleet.all_reduce_worker(1)
    fleet.stop_worker()
    say(f"worker {fleet.worker_index()} made {fleet.step} steps among {total}")
"""
PLACE = """
from fleet.role_maker import MPISymmetricRoleMaker
role = MPISymmetricRoleMaker().generate_role()
say(f"{role.kind.name} {role.index} of {role.worker_num}: {len(set(role.server_endpoints))} servers")
"""

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        MPIRUN is None, reason="mpirun is not installed (Debian: apt-get install openmpi-bin)"
    ),
]


def mpirun(directory: Path, ranks: int, script: str) -> list[str]:
    """Run a script on so many ranks of this machine; return what each said, by rank."""
    path = directory / "script.py"
    path.write_text(SAY + script)
    # As root, and with more ranks than cores, Open MPI runs nothing unless it is told to.
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    ended = subprocess.run(
        ["mpirun", *flags, sys.executable, str(path), str(directory)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FLEET_TERMINATION_LOG": os.devnull},
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return [(directory / f"rank-{rank}").read_text().strip() for rank in range(ranks)]


def test_two_ranks_train_together(tmp_path):
    assert mpirun(tmp_path, 2, TRAIN) == ["server 0 of 1 for 1", "worker 0 made 2 steps among 1"]


def test_four_ranks_find_their_places(tmp_path):
    assert mpirun(tmp_path, 4, PLACE) == [
        "SERVER 0 of 2: 2 servers",
        "WORKER 0 of 2: 2 servers",
        "SERVER 1 of 2: 2 servers",
        "WORKER 1 of 2: 2 servers",
    ]
