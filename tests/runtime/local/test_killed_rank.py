"""One of several processes of a pod is killed: all end soon, and the job says which it was."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.local import LocalRun, forked, job_manifest
from tests.support.processes import alive, wait_for

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
]

PLAIN = """
import os, pathlib, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
pathlib.Path(f"pid-{rank}.new").write_text(str(os.getpid()))
for step in range(10_000_000):
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        time.sleep(1)  # of ranks that end between two polls of torchrun, it names the lowest
        raise
    if step == 3:
        pathlib.Path(f"pid-{rank}.new").rename(f"pid-{rank}")
"""

OURS = """
import os, pathlib
import torch
from fleet.collective import fleet

torch.set_num_threads(1)
fleet.init()
rank = fleet.worker_index()
pathlib.Path(f"pid-{rank}.new").write_text(str(os.getpid()))
model = torch.nn.Linear(4, 2)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
for step in range(10_000_000):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if step == 3:
        pathlib.Path(f"pid-{rank}.new").rename(f"pid-{rank}")
"""

TORCHRUN = ["torchrun"]
FLEET_LAUNCH = ["python", "-m", "fleet.launch"]


@pytest.mark.serial
@pytest.mark.parametrize(
    ("script", "launcher", "killed"),
    [
        pytest.param(PLAIN, TORCHRUN, 3, id="the-last-plain"),
        pytest.param(OURS, FLEET_LAUNCH, 0, id="the-first-which-has-the-store-of-all"),
    ],
)
def test_every_rank_ends_within_ten_seconds_and_the_job_names_the_one(
    tmp_path: Path, script: str, launcher: list[str], killed: int
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.py").write_text(script)
    job = job_manifest("pass", server=None, trainers=2, failurePolicy={"action": "FailJob"})
    job["spec"] |= {"mode": "Collective"}
    job["spec"]["trainer"]["nprocPerNode"] = 2
    job["spec"]["trainer"]["template"]["spec"]["containers"][0]["command"] = [*launcher, "train.py"]
    with LocalRun(folder, forked(job)) as run:
        files = [folder / f"pid-{rank}" for rank in range(4)]
        wait_for(lambda: all(file.exists() for file in files), "four steps of all ranks", seconds=200)
        pids = [int(file.read_text()) for file in files]
        os.kill(pids[killed], signal.SIGKILL)
        wait_for(lambda: not any(map(alive, pids)), "the end of every rank", seconds=10)
        assert run.wait() == 1
        assert run.result()["state"] == "Failed"
        _, _, ended = run.stderr.partition("\ntiny: Failed, ")
        said = ended.splitlines()[1]  # the condition Failed of the job's status
        how = (
            r"(failed with exit code 1|lost a peer for good \(exit code 91\)"
            r"|was ended by SIGKILL \(exit code 137\))"
        )
        why = f"(rank {killed}: Signal 9|worker {killed} was ended by signal 9|trainer {killed} .*vanished)"
        assert re.match(rf"  tiny-trainer-\d {how}: .*{why}", said), run.stderr
