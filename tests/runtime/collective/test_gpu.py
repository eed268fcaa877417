"""Trainers on GPUs. Skipped where there are none, and where there are too few."""

import textwrap

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ON_ONE_GPU = 'os.environ |= {"LOCAL_RANK": os.environ["RANK"], "CUDA_VISIBLE_DEVICES": "0"}\n'
ALONE_BY_NCCL = """
from fleet.collective import trainer
trainer.Alone = lambda copies: trainer.GradientAverager(copies, trainer.BackwardPass(copies.group))
"""
"""Has one trainer average with itself, by what averages with others."""
ON_ONE_EACH = 'os.environ["LOCAL_RANK"] = os.environ["RANK"]\n'

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="PyTorch finds no GPU on this machine")]
needs_two = pytest.mark.skipif(GPUS < 2, reason="PyTorch finds fewer than two GPUs on this machine")


@pytest.mark.parametrize(
    ("size", "gpus"),
    [
        pytest.param(1, ON_ONE_GPU, id="alone"),
        pytest.param(1, ON_ONE_GPU + ALONE_BY_NCCL, id="by-nccl"),
        pytest.param(2, ON_ONE_GPU, id="by-gloo-where-two-share-a-gpu"),
        pytest.param(2, ON_ONE_EACH, id="by-nccl-on-two-gpus", marks=needs_two),
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


@needs_two
def test_synchronized_statistics_are_those_of_all_trainers_batches(trainers):
    """By torch: no buffer is broadcast here."""
    body = """
    fleet.init()
    rank, size = fleet.worker_index(), fleet.worker_num()

    def built():
        model = build(0)
        model.insert(1, torch.nn.BatchNorm1d(8))
        return model.cuda()

    def trained(model, strategy, ranks):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = sgd if strategy is None else fleet.distributed_optimizer(sgd, strategy, model=model)
        for step in range(4):
            optimizer.zero_grad()
            x, y = (torch.cat(parts).cuda() for parts in zip(*(batch(step, each) for each in ranks)))
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model.state_dict()

    strategy = fleet.DistributedStrategy(broadcast_buffers=False)
    found = trained(torch.nn.SyncBatchNorm.convert_sync_batchnorm(built()), strategy, [rank])
    every = torch.cat([found[f"1.running_{each}"] for each in ("mean", "var")]).cpu().numpy()
    most, least = (fleet.all_reduce_worker(every, mode=mode) for mode in ("max", "min"))
    assert (most == least).all()
    for name, expected in trained(built(), None, range(size)).items():
        torch.testing.assert_close(found[name], expected, msg=lambda said: f"{name}: {said}")
    fleet.stop_worker()
    """
    for process in trainers(ON_ONE_EACH + textwrap.dedent(body)):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
