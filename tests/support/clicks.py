"""A small model whose two slots share a table, on parameter servers or in one process."""

from typing import Any

import torch
from torch.nn.functional import mse_loss

import fleet

__all__ = [
    "ADAGRAD",
    "ADAM",
    "DIM",
    "ROWS",
    "SGD",
    "Clicks",
    "alone",
    "batch",
    "loss_of",
    "on_servers",
    "one_step",
]

ROWS, DIM = 50, 4


class Clicks(torch.nn.Module):
    """A model with two slots that share a table, and a dense layer."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head: Any = torch.nn.Linear(2 * DIM, 1)
        self.embedding: Any = embedding

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.embedding(ids).flatten(1)).squeeze(1)


def on_servers(**options: Any) -> Any:
    return Clicks(fleet.nn.DistributedEmbedding(ROWS, DIM, name="clicks", seed=3, **options))


def alone() -> Any:
    """Return an identically initialized model whose table is local."""
    table = on_servers().embedding.table
    config = table.config(torch.optim.SGD, {"lr": 0.1})
    values = fleet.tables.Table(config).look_up(torch.arange(ROWS).numpy())
    return Clicks(torch.nn.Embedding.from_pretrained(values, freeze=False, sparse=True))


def batch(step: int, trainer: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + trainer)
    return torch.randint(ROWS, (16, 2), generator=generator), torch.rand(16, generator=generator)


def loss_of(model: Any, step: int, trainer: int) -> torch.Tensor:
    ids, target = batch(step, trainer)
    return mse_loss(model(ids), target)


SGD = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    lambda model: [torch.optim.SGD(model.parameters(), lr=0.5)],
)
ADAM = (
    lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    lambda model: [
        torch.optim.Adam(model.head.parameters(), lr=0.05),
        torch.optim.SparseAdam(model.embedding.parameters(), lr=0.05),
    ],
)
ADAGRAD = (
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
)


def one_step(made: tuple[Any, Any, Any], step: int, index: int) -> None:
    _, model, wrapped = made
    wrapped.zero_grad()
    loss_of(model, step, index).backward()
    wrapped.step()
