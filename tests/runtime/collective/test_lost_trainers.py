"""Trainers of which one is killed, stopped or told to stop: any may be the one that looks for the others."""

import signal
import time

import pytest

from tests.support.processes import wait_for

TRAIN = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
for step in range(100_000):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
    if step == 3:
        pathlib.Path(f"training-{rank}").touch()
    time.sleep(0.01)
"""


@pytest.mark.serial
@pytest.mark.parametrize(
    ("lost", "how", "within_seconds", "said"),
    [
        pytest.param(0, signal.SIGKILL, 5, "vanished while the average of step", id="trainer-0-killed"),
        pytest.param(1, signal.SIGKILL, 5, "vanished while the average of step", id="trainer-1-killed"),
        pytest.param(2, signal.SIGKILL, 5, "vanished while the average of step", id="trainer-2-killed"),
        pytest.param(1, signal.SIGSTOP, 9, "sent no heartbeat for", id="trainer-1-stopped"),
    ],
)
def test_a_lost_trainer_is_named_by_whoever_notices_first(
    trainers, tmp_path, lost, how, within_seconds, said
):
    environ = {"FLEET_HEARTBEAT_SECONDS": "1", "FLAGS_rpc_deadline": "4000"}
    all_ = trainers(TRAIN, ranks=(0, 1, 2), size=3, **environ)
    for rank in range(3):
        wait_for((tmp_path / f"training-{rank}").exists, "the third step", seconds=60)
    all_[lost].send_signal(how)
    began = time.monotonic()
    others = {rank: all_[rank] for rank in range(3) if rank != lost}
    first = wait_for(
        lambda: [rank for rank, process in others.items() if process.poll() is not None],
        "the end of another trainer",
        seconds=20,
    )[0]
    assert time.monotonic() - began < within_seconds
    assert others[first].returncode == 91
    words = (tmp_path / f"words-{first}").read_text()
    assert f"trainer {lost} (127.0.0.1:" in words
    assert said in words


SAVE = """
import signal
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
"""
SAVE += TRAIN.replace("    optimizer.zero", "    if stopping:\n        break\n    optimizer.zero")
SAVE += """
fleet.stop_worker()
time.sleep(1.5)
torch.save(model.state_dict(), f"model-{rank}.pt")
"""


def test_a_trainer_told_to_stop_saves_before_it_ends(trainers, tmp_path):
    all_ = trainers(SAVE, FLAGS_rpc_deadline="8000")
    for rank in range(2):
        wait_for((tmp_path / f"training-{rank}").exists, "the third step", seconds=60)
    all_[1].send_signal(signal.SIGTERM)
    assert all_[1].wait(20) == 128 + signal.SIGTERM
    assert (tmp_path / "model-1.pt").exists()
    assert (tmp_path / "words-1").read_text() == "trainer 1 was stopped by SIGTERM\n"
    assert all_[0].wait(20) == 91
    assert not (tmp_path / "model-0.pt").exists()
