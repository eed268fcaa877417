"""Bags of tables on parameter servers, with real sockets, beside bags of torch in one process."""

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import fleet
from fleet.plan import DistributeTranspilerConfig
from tests.support.joined import joined, make, rows_on_servers
from tests.support.parameter_server import loopback
from tests.support.threads import at_once, one_torch_thread

ROWS, STEPS, BATCH = 40, 4, 8
GEO = DistributeTranspilerConfig(sync_mode=False, geo_sgd_mode=True, geo_sgd_need_push_nums=2)
HALF_ASYNC = DistributeTranspilerConfig(sync_mode=False, half_async=True)


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


def first_rows(table: Any) -> torch.Tensor:
    """Return the rows that a table begins with."""
    config = table.config(torch.optim.SGD, {"lr": 0.5})
    return fleet.tables.Table(config).look_up(torch.arange(ROWS).numpy())


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
                first_rows(table), freeze=False, mode=mode, include_last_offset=True
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


class OneBag(torch.nn.Module):
    """A bag, called with ids and offsets for both features."""

    def __init__(self, bag: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head: Any = torch.nn.Linear(6, 1)
        self.bag: Any = bag

    def forward(self, batch: Jagged) -> Any:
        vectors = self.bag(batch.ids, batch.sizes.cumsum(0) - batch.sizes)
        return self.head(torch.cat([vectors[:BATCH], vectors[BATCH:]], dim=1)).squeeze(1)


def bag_on_servers() -> OneBag:
    first_values = fleet.tables.Normal(0.0, 0.1)
    return OneBag(fleet.nn.DistributedEmbeddingBag(ROWS, 3, name="items", first_values=first_values))


def bag_alone() -> OneBag:
    rows = first_rows(bag_on_servers().bag.table)
    return OneBag(torch.nn.EmbeddingBag.from_pretrained(rows, freeze=False))


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


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def one_step(model: Any, optimizer: Any, step: int, trainer: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, step, trainer)
    loss.backward()
    optimizer.step()
    return float(loss.item())


def tables_of(model: Any) -> list[torch.Tensor]:
    """Return the tables of a model alone, in the order of their names on servers."""
    bags = [module for module in model.modules() if isinstance(module, torch.nn.EmbeddingBag)]
    return [bag.weight.detach() for bag in reversed(bags)]


modes = pytest.mark.parametrize("config", [HALF_ASYNC, GEO], ids=["half-async", "geo"])
kinds = pytest.mark.parametrize(
    ("on_servers", "alone"), [(bag_on_servers, bag_alone), (OnServers, Alone)], ids=["bag", "collection"]
)


@modes
@kinds
def test_one_trainer_that_nobody_waits_for_trains_bags_as_torch_does(config, on_servers, alone):
    twin: Any = alone()
    twins = adagrad(twin.parameters())
    expected = [one_step(twin, twins, step, 0) for step in range(STEPS)]
    with (
        one_torch_thread(),
        loopback(servers=2, model=on_servers, optimizer=adagrad, config=config) as job,
    ):
        trainer, model, optimizer = make(job, 0)
        trainer.start()
        losses = []
        for step in range(STEPS):
            losses.append(one_step(model, optimizer, step, 0))
            trainer.settle()
        trainer.complete()
        rows = [
            rows_on_servers(job, ROWS, each.shape[1], table) for table, each in enumerate(tables_of(twin))
        ]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-6)
    torch.testing.assert_close(model.head.weight, twin.head.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(rows, tables_of(twin), rtol=0, atol=1e-6)


@modes
@kinds
def test_two_trainers_that_nobody_waits_for_train_bags_to_the_end(config, on_servers, alone):
    rounds, losses = 6, [list[float](), list[float]()]
    first, learned = alone(), alone()
    with (
        one_torch_thread(),
        loopback(servers=2, trainers=2, model=on_servers, optimizer=adagrad, config=config) as job,
    ):
        made = [make(job, index) for index in range(2)]
        at_once(*(trainer.start for trainer, _, _ in made))

        def run(index: int) -> None:
            trainer, model, optimizer = made[index]
            for step in range(rounds * STEPS):
                losses[index].append(one_step(model, optimizer, step % STEPS, index))
            trainer.settle()

        at_once(*(lambda index=index: run(index) for index in range(2)))
        at_once(*(trainer.complete for trainer, _, _ in made))
        rows = [
            rows_on_servers(job, ROWS, each.shape[1], table) for table, each in enumerate(tables_of(learned))
        ]
        for running in job.servers:
            running.join()
            assert running.failure is None
    for each in losses:
        assert sum(each[-STEPS:]) < 0.4 * sum(each[:STEPS])
    for mine, found in zip(tables_of(learned), rows, strict=True):
        mine.copy_(found)
    for index, (_, model, _) in enumerate(made):
        for each in (first, learned):
            each.head.load_state_dict(model.head.state_dict())
        before, after = (
            sum(loss_of(each, step, index).item() for step in range(STEPS)) for each in (first, learned)
        )
        assert after < 0.8 * before  # the servers' rows are what both have learned
