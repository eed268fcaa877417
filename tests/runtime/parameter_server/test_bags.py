"""Bags of tables on parameter servers, with real sockets, beside bags of torch in one process."""

from typing import Any

import torch
from torch.nn.functional import mse_loss

import fleet
from tests.support.joined import joined
from tests.support.threads import at_once

ROWS, STEPS, BATCH = 40, 4, 8


class Jagged:
    """A batch of ids of two features, as TorchRec's ``KeyedJaggedTensor`` hands them out."""

    def __init__(self, step: int, trainer: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + trainer)
        self.sizes = torch.randint(0, 4, (2 * BATCH,), generator=generator)
        self.ids = torch.randint(ROWS, (int(self.sizes.sum()),), generator=generator)
        self.target = torch.rand(BATCH, generator=generator)

    def keys(self) -> list[str]:
        return ["shown", "clicked"]

    def values(self) -> torch.Tensor:
        return self.ids

    def lengths(self) -> torch.Tensor:
        return self.sizes

    def weights_or_none(self) -> None:
        return None


def configs() -> list[fleet.nn.EmbeddingBagConfig]:
    first_values = fleet.tables.Normal(0.0, 0.1)
    return [
        fleet.nn.EmbeddingBagConfig(
            ROWS, 3, "items", ["shown", "clicked"], pooling="MEAN", first_values=first_values
        ),
        fleet.nn.EmbeddingBagConfig(None, 2, "crosses", ["clicked"], first_values=first_values),
    ]


class OnServers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head: Any = torch.nn.Linear(8, 1)
        self.bags: Any = fleet.nn.EmbeddingBagCollection(configs())

    def forward(self, batch: Jagged) -> Any:
        return self.head(self.bags(batch).values()).squeeze(1)


class Alone(torch.nn.Module):
    """The same of bags of torch, which begin with the same rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head: Any = torch.nn.Linear(8, 1)
        modes = ("mean", "sum")
        self.bags: Any = torch.nn.ModuleList(
            torch.nn.EmbeddingBag.from_pretrained(
                fleet.tables.Table(table.config(torch.optim.SGD, {"lr": 0.5})).look_up(
                    torch.arange(ROWS).numpy()
                ),
                freeze=False,
                mode=mode,
                include_last_offset=True,
            )
            for table, mode in zip(OnServers().bags.distributed_tables, modes, strict=True)
        )

    def forward(self, batch: Jagged) -> Any:
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), batch.sizes.cumsum(0)])
        shown, clicked = (ends[begin : begin + BATCH + 1] for begin in (0, BATCH))
        vectors = [
            self.bags[0](batch.ids[: shown[-1]], shown),
            self.bags[0](batch.ids[clicked[0] :], clicked - clicked[0]),
            self.bags[1](batch.ids[clicked[0] :], clicked - clicked[0]),
        ]
        return self.head(torch.cat(vectors, dim=1)).squeeze(1)


def loss_of(model: Any, step: int, trainer: int) -> Any:
    batch = Jagged(step, trainer)
    return mse_loss(model(batch), batch.target)


def test_a_collection_on_two_servers_learns_as_bags_of_torch_in_one_process():
    losses: list[list[float]] = [[], []]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    with joined(2, servers=2, model=OnServers, optimizer=sgd) as made:

        def run(index: int) -> None:
            _, model, optimizer = made[index]
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, step, index)
                loss.backward()
                optimizer.step()
                losses[index].append(loss.item())

        at_once(*(lambda index=index: run(index) for index in range(2)))
    alone: Any = Alone()
    expected: list[list[float]] = [[], []]
    optimizer = sgd(alone.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for trainer in range(2):
            loss = loss_of(alone, step, trainer)
            (loss / 2).backward()
            expected[trainer].append(loss.item())
        optimizer.step()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=1e-6)
