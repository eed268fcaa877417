"""Trainers on GPUs. Skipped where there are none, and where there are too few."""

import textwrap

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ON_ONE_GPU = 'os.environ |= {"LOCAL_RANK": os.environ["RANK"], "CUDA_VISIBLE_DEVICES": "0"}\n'
ON_ONE_EACH = 'os.environ["LOCAL_RANK"] = os.environ["RANK"]\n'

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="PyTorch finds no GPU on this machine")]


@pytest.mark.parametrize(
    ("size", "gpus"),
    [
        pytest.param(1, ON_ONE_GPU, id="by-nccl"),
        pytest.param(2, ON_ONE_GPU, id="by-gloo-where-two-share-a-gpu"),
        pytest.param(
            2,
            ON_ONE_EACH,
            id="by-nccl-on-two-gpus",
            marks=pytest.mark.skipif(GPUS < 2, reason="PyTorch finds fewer than two GPUs on this machine"),
        ),
    ],
)
def test_a_model_may_move_to_the_gpu_after_it_is_distributed(trainers, size, gpus):
    body = """
    fleet.init()
    alone, model = build(0), build(0)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.cuda()
    rank, size = fleet.worker_index(), fleet.worker_num()
    x, y = batch(0, rank)
    torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    optimizer.step()
    sum(loss_of(alone, 0, other) / size for other in range(size)).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other.cpu())
    fleet.stop_worker()
    """
    for process in trainers(gpus + textwrap.dedent(body), ranks=tuple(range(size)), size=size):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


def test_a_hundred_graphs_are_captured_while_the_watch_runs(trainers):
    body = """
    fleet.init()
    model = build(0).cuda()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.init_worker()
    x, y = (each.cuda() for each in batch(0, fleet.worker_index()))

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    for _ in range(100):
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            logits = model(x)
        graph.replay()
    torch.testing.assert_close(logits, model(x))
    step()
    fleet.stop_worker()
    """
    for process in trainers(ON_ONE_GPU + textwrap.dedent(body), FLEET_HEARTBEAT_SECONDS="0.05"):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
