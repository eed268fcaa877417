"""Options of rows in a job, with real sockets: any number of servers holds the same table, to the bit."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.checkpoint import TrainStatus
from fleet.errors import ConfigurationError
from fleet.plan import DistributeTranspilerConfig
from fleet.tables import (
    BFloat16,
    BloomFilter,
    CountFilter,
    LeastRecentlyUsed,
    LocalDisk,
    LowestScore,
    Normal,
    Probability,
    TimeToLive,
    row_log,
    storage,
)
from fleet.tables.ids import SHARDS
from fleet.tables.rules import Rows, Slot
from tests.support.joined import joined
from tests.support.tables import CROWDED, crowd
from tests.support.threads import at_once

IDS = torch.from_numpy(crowd(20, CROWDED, negative=True))
"""So many of three virtual shards that each is full."""
STEPS, SAVED_AT = 8, 4
GIVEN = {int(number): torch.full((4,), float(at)) for at, number in enumerate(IDS[::3])}
"""Vectors by id."""


class Slowing:
    """A rule of one's own: steps by the mean of the signs so far, less and less."""

    slots = (Slot("signs"),)

    def defaults(self) -> dict[str, float]:
        return {"lr": 1.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        signs = rows.state["signs"].add_(rows.gradient.sign())
        rows.value.add_(signs, alpha=-options["lr"] / step**2)


TABLES: dict[str, dict[str, Any]] = {
    "counted-and-timed": {"admission": CountFilter(2), "eviction": (TimeToLive(2),)},
    "bloom-and-least-recent": {
        "admission": BloomFilter(2, 2000),
        "eviction": (LeastRecentlyUsed(8 * SHARDS),),
    },
    "by-chance-and-score-on-a-disk": {
        "admission": Probability(0.5),
        "eviction": (LowestScore(8 * SHARDS, 0.9),),
        "storage": LocalDisk(memory=1),
    },
    "by-a-rule-of-its-own-with-a-schedule": {
        "rule": Slowing(),
        "options": {"lr": 0.5},
        "admission": CountFilter(2),
    },
    "from-vectors": {
        "warm_start": lambda: (list(GIVEN), torch.stack(list(GIVEN.values()))),
        "admission": CountFilter(2),
    },
}


@pytest.fixture(autouse=True)
def _rows_go_to_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_MIN_ROWS", 8)
    monkeypatch.setattr(row_log, "_SEGMENT_BYTES", 1 << 12)


class OnServers(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head: Any = torch.nn.Linear(4, 1)
        rounded = BFloat16(stochastic=True)
        table = fleet.nn.DistributedTable("clicks", 4, None, Normal(), row_type=rounded, **options)
        self.bag: Any = fleet.nn.DistributedEmbeddingBag(
            None, 4, mode="sum", padding_idx=int(IDS[0]), table=table
        )

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.bag(ids)).mean()


def rows_of(model: Any) -> Any:
    with torch.no_grad():
        return model.bag(IDS[1:, None]).clone()


def train(
    servers: int,
    options: dict[str, Any],
    steps: range = range(STEPS),
    save: Path | None = None,
    directory: Path | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train together; return all rows before and after."""

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.5)

    model = partial(OnServers, **options)
    with joined(2, servers=servers, model=model, optimizer=adam, directory=directory) as made:
        before = rows_of(made[0][1])

        def run(index: int) -> None:
            _, model, optimizer = made[index]
            for step in steps:
                generator = torch.Generator().manual_seed(100 * step + index)
                most = IDS.numel() if step < STEPS // 2 else IDS.numel() // 2
                ids = IDS[torch.randint(most, (8, 3), generator=generator)]
                optimizer.zero_grad()
                model(ids).backward()
                optimizer.step()

        at_once(*(lambda index=index: run(index) for index in range(2)))
        if save is not None:
            made[0][0].save(str(save), TrainStatus())
        return before, rows_of(made[0][1])


@pytest.mark.parametrize("options", TABLES.values(), ids=TABLES)
def test_servers_do_not_show_whatever_is_admitted_evicted_and_rounded(options, tmp_path):
    before, one = train(1, options)
    also_before, three = train(3, options)
    train(2, options, range(SAVED_AT), save=tmp_path)
    _, moved = train(3, options, range(SAVED_AT, STEPS), directory=tmp_path)
    assert torch.equal(before, also_before)
    assert torch.equal(one, three)
    assert torch.equal(one, moved)
    changed = (one != before).any(dim=1)
    assert 0 < changed.sum() < IDS.numel() - 1
    assert torch.equal(one, one.bfloat16().float())


@pytest.mark.parametrize("geo", [False, True], ids=["sync", "geo"])
def test_a_table_begins_with_the_vectors_that_are_given_and_other_ids_as_ever(geo):
    options = {"warm_start": TABLES["from-vectors"]["warm_start"]}
    config = DistributeTranspilerConfig(sync_mode=not geo, geo_sgd_mode=geo)
    found = []
    for warm in (options, {}):
        with joined(1, model=partial(OnServers, **warm), optimizer=torch.optim.SGD, config=config) as made:
            found.append(rows_of(made[0][1]))
    given, ever = found
    for at, number in enumerate(IDS[1:].tolist()):
        assert torch.equal(given[at], GIVEN.get(number, ever[at]))
    assert not torch.equal(given, ever)


def test_vectors_of_another_shape_end_the_server_with_the_table():
    def model() -> OnServers:
        return OnServers(warm_start=lambda: ([1, 2], torch.zeros(2, 3)))

    with (
        pytest.raises(ConfigurationError, match=r"vectors of shape \[2, 3\], expected \[2, 4\]"),
        joined(1, model=model, optimizer=torch.optim.SGD),
    ):
        pass
