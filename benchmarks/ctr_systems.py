"""The systems of the click-through-rate benchmark: plain PyTorch, and fleet with parameter servers.

Batches are random, so that nothing is read or parsed: ids as in `benchmarks.sparse_systems`, 13 counts and a
label. Adam updates the layers, and the rows that have a gradient.
"""

from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sparse_systems import DIMENSION, ROWS, SLOTS, id_batches
from benchmarks.workload import Config, End, Step, build_layers

__all__ = ["WIDTHS", "fleet_serve", "fleet_trainer", "torch_trainer"]

COUNTS = 13
WIDTHS = (COUNTS + SLOTS * DIMENSION, 400, 400, 400, 1)
LEARNING_RATE = 1e-3


class _Clicks(nn.Module):
    """A model whose dense layers take table rows and counts as inputs."""

    def __init__(self, table: nn.Module, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.Sequential(*build_layers(widths))

    def forward(self, counts: Tensor, ids: Tensor) -> Tensor:
        logits: Tensor = self.layers(torch.cat([counts, self.table(ids).flatten(1)], dim=1))
        return logits.squeeze(1)


def _loop(model: nn.Module, index: int, *optimizers: torch.optim.Optimizer) -> Step:
    """Return a function that runs a step on the trainer's next batch."""
    batches, numbers = id_batches(index), count()
    generator = torch.Generator().manual_seed(index)
    counts = torch.rand(len(batches[0]), COUNTS, generator=generator)
    labels = torch.randint(2, (len(counts),), generator=generator).float()

    def step(size: int) -> None:
        ids = batches[next(numbers) % len(batches)][:size]
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(counts[:size], ids), labels[:size]).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def torch_trainer(config: Config) -> tuple[Step, End]:
    """Train in a single process with plain PyTorch."""
    table = nn.Embedding(ROWS, DIMENSION, sparse=True)
    nn.init.zeros_(table.weight)
    model = _Clicks(table, config.widths)
    of_rows = torch.optim.SparseAdam(table.parameters(), lr=LEARNING_RATE)
    of_layers = torch.optim.Adam(model.layers.parameters(), lr=LEARNING_RATE)
    return _loop(model, config.index, of_rows, of_layers), lambda: None


def _fleet_init(config: Config) -> tuple[Any, Any, Any]:
    import fleet as names
    from fleet import role_maker
    from fleet.parameter_server import fleet

    kind = role_maker.Role.SERVER if config.role == "server" else role_maker.Role.WORKER
    fleet.init(role_maker.UserDefinedRoleMaker(config.index, kind, config.num_trainers, config.endpoints))
    table = names.nn.DistributedEmbedding(ROWS, DIMENSION, name="rows", first_values=0.0)
    model = _Clicks(table, config.widths)
    create = names.create_async_strategy if config.system == "ctrasync" else names.DistributedStrategy
    optimizer = fleet.distributed_optimizer(
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), create(), model
    )
    return fleet, model, optimizer


def fleet_trainer(config: Config) -> tuple[Step, End]:
    """Train with fleet's parameter servers in sync or async mode."""
    fleet, model, optimizer = _fleet_init(config)
    fleet.init_worker()
    return _loop(model, config.index, optimizer), fleet.stop_worker


def fleet_serve(config: Config) -> None:
    """Serve until every trainer has finished."""
    fleet, _, _ = _fleet_init(config)
    fleet.run_server()
