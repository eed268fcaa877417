"""Trainers that torchrun starts, on this machine: its agents keep the store, and say who is who."""

import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.forked_python import ForkedPython
from tests.support.processes import free_ports
from tests.support.replicas import Replica

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
"""
ENDS = """
fleet.stop_worker()
print(f"trainer {fleet.worker_index()} ended in life {life}", flush=True)
"""
# Only the ranks are known, not the endpoints.
TRAINS_A_BUILT_PROGRAM = """
import numpy as np
from fleet import fluid
assert fleet.worker_endpoints() == []
x = fluid.layers.data(name="x", shape=[3])
loss = fluid.layers.mean(fluid.layers.square(fluid.layers.fc(x, size=1) - 1.0))
fleet.distributed_optimizer(fluid.optimizer.SGD(0.1)).minimize(loss)
executor = fluid.Executor(fluid.CPUPlace())
executor.run(fleet.startup_program)
draw = np.random.default_rng(fleet.worker_index())
for _ in range(5):
    feed = {"x": draw.standard_normal((4, 3)).astype("float32")}
    executor.run(fleet.main_program, feed=feed, fetch_list=[loss])
(weight,) = [each.name for each in fleet.main_program.all_parameters() if each.shape == (3, 1)]
value = np.array(fluid.global_scope().find_var(weight).get_tensor())
print(f"weight {value.tobytes().hex()} in life {life}", flush=True)
executor.close()
"""


# What torchrun does, but with its trainers forked: none of its processes imports torch anew.
TORCHRUN = """
import runpy, sys
from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch

def train():
    runpy.run_path("script.py", run_name="__main__")

config, _, _ = run.config_from_args(run.parse_args([*sys.argv[1:], "script.py"]))
config.start_method = "fork"
elastic_launch(config, train)()
"""


def agent(folder: Path, script: str, *flags: str, **environ: str) -> Replica:
    """Start an agent of torchrun, which starts the script."""
    (folder / "script.py").write_text(script)
    (folder / "torchrun.py").write_text(TORCHRUN)
    told = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FLAGS_rpc_deadline": "10000"}
    log = folder / f"agent-{environ.get('NODE_RANK', '0')}.log"
    with log.open("wb") as output:
        process = ForkedPython(
            folder / "torchrun.py",
            *flags,
            env=os.environ | told | environ,
            output=output,
            errors=output,
            cwd=folder,
        )
    return Replica("torchrun", process, log)


def ended(started: list[Replica]) -> list[str]:
    """Return what each has said when all have ended well; none outlives this."""
    try:
        for each in started:
            each.expect(0, seconds=150)
    finally:
        for each in started:
            each.process.send_signal(signal.SIGTERM)  # it ends its workers, too
            each.process.wait()
    return [each.output for each in started]


def restarted(folder: Path, script: str, *rendezvous: str) -> str:
    """Run a script that fails once as two trainers of one agent, which restarts both; return what they say.

    A line of c10d's log may precede a sentence without an end of line between them.
    """
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", *rendezvous]
    (said,) = ended([agent(folder, FAILS_ONCE + script, *flags)])
    return said


def test_trainers_that_torchrun_starts_anew_meet_again(tmp_path):
    (port,) = free_ports(1)
    said = restarted(tmp_path, ENDS, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    assert all(f"trainer {rank} ended in life 1\n" in said for rank in range(2)), said


def test_trainers_of_a_static_rendezvous_meet_again_and_train_a_built_program(tmp_path):
    (port,) = free_ports(1)
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    said = restarted(tmp_path, TRAINS_A_BUILT_PROGRAM, *where)
    weights = re.findall(r"weight ([0-9a-f]{24}) in life 1\n", said)
    assert len(weights) == 2, said
    assert len(set(weights)) == 1


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
    said = "".join(ended(agents))
    assert "pod 1 is trainer 0 of rank 0 []\n" in said
    assert "pod 0 is trainer 1 of rank 1 []\n" in said
