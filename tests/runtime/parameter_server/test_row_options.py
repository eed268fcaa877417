"""Options of rows in a job, with real sockets: any number of servers holds the same table, to the bit."""

from typing import Any

import torch

import fleet
from fleet.tables import BFloat16, CountFilter, Normal, TimeToLive
from tests.support.joined import joined
from tests.support.threads import at_once

IDS = torch.arange(-30, 30)
STEPS = 6


class OnServers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head: Any = torch.nn.Linear(4, 1)
        table = fleet.nn.DistributedTable(
            "clicks",
            4,
            None,
            Normal(),
            row_type=BFloat16(stochastic=True),
            admission=CountFilter(2),
            eviction=(TimeToLive(2),),
        )
        self.bag: Any = fleet.nn.DistributedEmbeddingBag(None, 4, mode="sum", table=table)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.bag(ids)).mean()


def rows_after_training(servers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Train together; return all rows before and after."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    def rows_of(model: Any) -> Any:
        with torch.no_grad():
            return model.bag(IDS[:, None]).clone()

    with joined(2, servers=servers, model=OnServers, optimizer=sgd) as made:
        before = rows_of(made[0][1])

        def run(index: int) -> None:
            _, model, optimizer = made[index]
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(100 * step + index)
                ids = torch.randint(-30, 10 if step > 2 else 30, (8, 3), generator=generator)
                optimizer.zero_grad()
                model(ids).backward()
                optimizer.step()

        at_once(*(lambda index=index: run(index) for index in range(2)))
        return before, rows_of(made[0][1])


def test_servers_do_not_show_whatever_is_admitted_evicted_and_rounded():
    before, one = rows_after_training(1)
    also_before, two = rows_after_training(2)
    assert torch.equal(before, also_before)
    assert torch.equal(one, two)
    changed = (one != before).any(dim=1)
    assert 0 < changed.sum() < IDS.numel()
    assert torch.equal(one, one.bfloat16().float())
