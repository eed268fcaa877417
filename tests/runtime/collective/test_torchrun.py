"""Trainers that torchrun starts, on this machine: its agents keep the store, and say who is who."""

import os
import subprocess
import sys
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
