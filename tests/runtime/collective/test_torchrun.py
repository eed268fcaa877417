"""Trainers that torchrun starts, on this machine: its agents keep the store, and say who is who."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.processes import free_ports

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name"),
]

FAILS_ONCE = """
import os
from fleet.collective import fleet

fleet.init()
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
if (life, fleet.worker_index()) == ("0", 1):
    raise ValueError("its first life fails")
fleet.stop_worker()
print(f"trainer {fleet.worker_index()} ended in life {life}", flush=True)
"""


def agent(folder: Path, script: str, *flags: str, **environ: str) -> subprocess.Popen[str]:
    """Start an agent of torchrun, which starts the script."""
    (folder / "script.py").write_text(script)
    told = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FLAGS_rpc_deadline": "10000"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *flags, "script.py"],
        cwd=folder,
        env=os.environ | told | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(started: list[subprocess.Popen[str]]) -> list[str]:
    """Return what each has said when all have ended well; none outlives this."""
    try:
        said = [each.communicate(timeout=150)[0] for each in started]
    finally:
        for each in started:
            each.terminate()  # it ends its workers, too
            each.wait()
    assert [each.returncode for each in started] == [0] * len(started), "\n".join(said)
    return said


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_trainers_that_torchrun_starts_anew_meet_again(tmp_path, rendezvous):
    (port,) = free_ports(1)
    where = {
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"],
    }
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", *where[rendezvous]]
    (said,) = ended([agent(tmp_path, FAILS_ONCE, *flags)])
    assert {f"trainer {rank} ended in life 1" for rank in range(2)} <= set(said.splitlines())


def test_a_rendezvous_that_sorts_nodes_says_who_is_who(tmp_path):
    """Agents are sorted by their host and process, pods by their number: `-10` comes before `-2`."""
    port, *ports = free_ports(3)
    script = """
    import os
    from fleet.collective import fleet
    fleet.init()
    pod, rank = os.environ["NODE_RANK"], os.environ["RANK"]
    print(f"pod {pod} is trainer {fleet.worker_index()} of rank {rank}", fleet.worker_endpoints())
    fleet.stop_worker()
    """
    endpoints = [f"127.0.0.1:{each}" for each in ports]
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    agents = [
        agent(
            tmp_path,
            textwrap.dedent(script),
            *flags,
            TRAINING_ROLE="TRAINER",
            PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
            PADDLE_TRAINER_ID=str(pod),
            PADDLE_CURRENT_ENDPOINT=endpoints[pod],
            NODE_RANK=str(pod),
        )
        for pod in (1, 0)
    ]
    said = "".join(ended(agents)).splitlines()
    assert {"pod 1 is trainer 0 of rank 0 []", "pod 0 is trainer 1 of rank 1 []"} <= set(said)
