"""The systems of the single-trainer benchmark: plain PyTorch, DDP and fleet.

The models are the example's ResNet-50, and one with 1,000 parameters of 8 or 64 numbers; they train on a GPU
if there is one. Gradients are set to None, as ``zero_grad()`` does by default.
"""

import runpy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.workload import LEARNING_RATE, Config, End, Step, build_layers

__all__ = ["MODELS", "SMALL", "WAYS", "device", "num_samples", "trainer"]

MODELS = {"resnet": "ResNet-50", "small": "1,000 small parameters"}
WAYS = {"plain": "PyTorch alone", "ddp": "DistributedDataParallel", "fleet": "fleet.collective"}
"""A system's name combines a model and a way, as in resnetddp."""

_RESNET = Path(__file__).parents[1] / "examples" / "resnet50" / "model.py"
SMALL = (8,) * 501
"""The widths of layers with 1,000 parameters, of 8 or 64 numbers."""
_PIXELS = 224


def device() -> torch.device:
    """Return the device on which trainers compute."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def num_samples(where: torch.device) -> int:
    """Return the number of samples in a batch on a device."""
    return 32 if where.type == "cuda" else 1


def trainer(config: Config) -> tuple[Step, End]:
    """Train the model in the way that the system's name selects."""
    name = next(name for name in MODELS if config.system.startswith(name))
    way = config.system.removeprefix(name)
    where = device()
    model, *batch = _workload(name, num_samples(where))
    model.to(where)
    inputs, labels = (each.to(where) for each in batch)
    called, end = model, _nothing
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if way == "ddp":
        carrier = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(carrier, init_method=f"tcp://{config.endpoints[0]}", rank=0, world_size=1)
        called = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        end = dist.destroy_process_group
    elif way == "fleet":
        from fleet import role_maker
        from fleet.collective import fleet

        fleet.init(role_maker.UserDefinedCollectiveRoleMaker(0, list(config.endpoints)))
        optimizer = fleet.distributed_optimizer(optimizer, model=model)
        fleet.init_worker()
        end = fleet.stop_worker

    def step(_: int) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(called(inputs), labels).backward()
        optimizer.step()

    return step, end


def _nothing() -> None:
    pass


def _workload(name: str, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model with fixed initial values, and one batch."""
    torch.manual_seed(0)
    if name == "small":
        model: nn.Module = nn.Sequential(*build_layers(SMALL))
        return model, torch.randn(samples, SMALL[0]), torch.randint(SMALL[-1], (samples,))
    model = runpy.run_path(str(_RESNET))["ResNet"](1000)
    return model, torch.randn(samples, 3, _PIXELS, _PIXELS), torch.randint(1000, (samples,))
