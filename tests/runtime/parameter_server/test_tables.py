"""Tables on parameter servers, with real sockets: what a job comes to, and what one process comes to."""

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import fleet
from tests.support.joined import joined
from tests.support.threads import at_once

ROWS, DIM, STEPS = 50, 4, 5


class Clicks(torch.nn.Module):
    """Two slots, which share one table, and a layer."""

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
    """Return the model with a table of its own, which begins with the same values."""
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


def train(
    optimizer: Any, servers: int, trainers: int = 2, steps: int = STEPS, **arguments: Any
) -> tuple[Any, Any]:
    """Train together; return the losses of each trainer, and all rows."""
    losses: list[list[float]] = [[] for _ in range(trainers)]
    with joined(trainers, servers=servers, model=on_servers, optimizer=optimizer, **arguments) as made:

        def run(index: int) -> None:
            _, model, wrapped = made[index]
            for step in range(steps):
                wrapped.zero_grad()
                loss = loss_of(model, step, index)
                loss.backward()
                wrapped.step()
                losses[index].append(loss.item())

        at_once(*(lambda index=index: run(index) for index in range(trainers)))
        with torch.no_grad():
            rows = made[0][1].embedding(torch.arange(ROWS))
        head = made[0][1].head.weight.detach().clone()
    return losses, (rows, head)


def train_alone(optimizers: Any, trainers: int = 2) -> tuple[Any, Any]:
    """Train by one model: gradients of each part of the batch, added, and divided by their number."""
    model = alone()
    made = optimizers(model)
    losses: list[list[float]] = [[] for _ in range(trainers)]
    for step in range(STEPS):
        total: dict[str, torch.Tensor] = {}
        for trainer in range(trainers):
            model.zero_grad()
            loss = loss_of(model, step, trainer)
            loss.backward()
            losses[trainer].append(loss.item())
            for name, parameter in model.named_parameters():
                grad = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
                total[name] = total[name] + grad if name in total else grad
        for name, parameter in model.named_parameters():
            parameter.grad = total[name] * (1.0 / trainers) if trainers > 1 else total[name]
        for optimizer in made:
            optimizer.step()
    return losses, (model.embedding.weight.detach(), model.head.weight.detach())


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


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("optimizers", [SGD, ADAM, ADAGRAD], ids=["sgd", "adam", "adagrad"])
def test_a_table_on_any_number_of_servers_is_that_of_one_process(optimizers, servers):
    losses, (rows, head) = train(optimizers[0], servers)
    expected, (rows_alone, head_alone) = train_alone(optimizers[1])
    torch.testing.assert_close(rows, rows_alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(head, head_alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=1e-7)
