"""Options of a table compose: every two of different kinds are in one of these tables."""

from dataclasses import fields
from itertools import combinations, product

import numpy as np
import pytest
import torch

from fleet.nn import DistributedEmbeddingBag, DistributedTable
from fleet.tables import (
    BFloat16,
    BloomFilter,
    Constant,
    CountFilter,
    Float32,
    LeastRecentlyUsed,
    LocalDisk,
    LowestScore,
    Memory,
    Normal,
    Probability,
    Table,
    TableConfig,
    TimeToLive,
    Uniform,
    row_log,
    storage,
)
from fleet.tables.ids import SHARDS
from fleet.tables.rules import FTRL, SGD, Adagrad, Adam, Momentum, RMSprop, RowwiseAdagrad
from tests.support.tables import CROWDED, Servers, assert_equal, crowd, updates

PER_SHARD = 24
TTL, LRU, SCORE = TimeToLive(4), LeastRecentlyUsed(12 * SHARDS), LowestScore(10 * SHARDS, 0.9)
OPTIONS = {
    "rule": (SGD(), Momentum(), Adagrad(), RowwiseAdagrad(), Adam(), RMSprop(), FTRL()),
    "row_type": (Float32(), BFloat16(), BFloat16(stochastic=True)),
    "admission": (None, CountFilter(2), BloomFilter(2, 2000), Probability(0.5)),
    "eviction": ((), (TTL,), (LRU,), (SCORE,), (TTL, LRU), (TTL, SCORE), (SCORE, LRU)),
    "num_embeddings": (None, 200_000),
    "first_values": (Normal(0.0, 0.1), Uniform(-1.0, 1.0), Constant(0.5)),
    "dimension": (1, 5, 8),
    "storage": (Memory(), LocalDisk(memory=1)),
}


def pairs_of(chosen):
    return set(combinations(enumerate(chosen), 2))


def every_pair():
    """Return each two options of different kinds, as pairs of a kind's number and the option's in it."""
    kinds = [[(at, number) for number in range(len(options))] for at, options in enumerate(OPTIONS.values())]
    return {pair for one, other in combinations(kinds, 2) for pair in product(one, other)}


def covering():
    """Return choices of one option of each kind in which every two options meet."""
    random, wanted, choices = np.random.default_rng(0), every_pair(), []
    while wanted:
        some = np.stack([random.integers(0, len(options), 100) for options in OPTIONS.values()], axis=1)
        for at, number in min(wanted):
            some[:, at] = number
        best = max(some.tolist(), key=lambda chosen: len(pairs_of(chosen) & wanted))
        wanted -= pairs_of(best)
        choices.append(best)
    return choices


CHOICES = covering()


def configured(chosen):
    given = {kind: OPTIONS[kind][at] for (kind, at) in zip(OPTIONS, chosen, strict=True)}
    return TableConfig(name="t", seed=3, options={"lr": 0.1}, **given)


@pytest.fixture(autouse=True)
def _rows_go_to_the_disk(monkeypatch):
    monkeypatch.setattr(storage, "_MIN_ROWS", 8)
    monkeypatch.setattr(row_log, "_SEGMENT_BYTES", 1 << 12)


def name_of(chosen):
    return "-".join(str(number) for number in chosen)


def test_every_two_options_meet():
    assert set().union(*(pairs_of(chosen) for chosen in CHOICES)) == every_pair()
    assert len(every_pair()) > 300
    assert len(CHOICES) < 80


@pytest.mark.parametrize("chosen", CHOICES, ids=name_of)
def test_servers_do_not_show_nor_looking_up_nor_moving(chosen):
    config = configured(chosen)
    ids = crowd(PER_SHARD, CROWDED, negative=config.num_embeddings is None)
    many = [Servers(config, number) for number in (1, 2, 3)]
    for chosen_ids, gradient, step in updates(ids, 12, config.dimension):
        for each in many:
            each.update(chosen_ids, gradient.clone(), step)
        if step == 6:
            many[1] = many[1].moved(3)
        found = many[0].look_up(ids)
        assert all(torch.equal(each.look_up(ids), found) for each in many[1:])
    whole = many[0].rows()
    for each in many[1:]:
        assert_equal(each.rows(), whole)
    if not config.eviction and config.admission is None:
        assert whole.ids.size > 1.5 * PER_SHARD
    else:
        assert 0 < whole.ids.size < 3 * PER_SHARD


class Trainer:
    """One trainer's rows of a table on servers, as modules read them; a `fleet.nn.RowSource`."""

    def __init__(self, config, number):
        self.servers = Servers(config, number)
        self.steps = 0

    def fetch(self, name, ids):
        return self.servers.look_up(ids)

    def prefetch(self, name, ids):
        self.servers.look_up(ids)

    def touched(self, name, touched):
        self.steps += 1
        self.servers.update(touched.ids, touched.gradient().clone(), self.steps)


@pytest.mark.parametrize("chosen", CHOICES[::3], ids=name_of)
def test_a_padding_id_has_no_row_whatever_the_table_is_and_fetching_ahead_does_not_show(chosen):
    config = configured(chosen)
    ids = crowd(PER_SHARD, CROWDED, negative=config.num_embeddings is None)
    padding, others = int(ids[7]), np.delete(ids, 7)
    named = {each.name: getattr(config, each.name) for each in fields(config)}
    found = []
    for number in (1, 3):
        table = DistributedTable(**named)
        bag = DistributedEmbeddingBag(
            config.num_embeddings, config.dimension, mode="sum", padding_idx=padding, table=table
        )
        assert table.config() == config
        trainer = Trainer(config, number)
        table.bind(trainer)
        for batch, _, step in updates(others, 8, config.dimension):
            with_padding = torch.from_numpy(np.append(batch, padding))[:, None]
            if number == 3:
                bag.prefetch(with_padding)
            vectors = bag(with_padding)
            assert not vectors[-1].any()
            (vectors * step / 8).sum().backward()
        rows = trainer.servers.rows()
        assert padding not in rows.ids
        assert rows.ids.size
        found.append(rows)
    assert_equal(*found)


@pytest.mark.parametrize("chosen", CHOICES[::3], ids=name_of)
def test_an_update_says_what_its_rows_were(chosen):
    config = configured(chosen)
    table = Table(config)
    for ids, gradient, step in updates(crowd(PER_SHARD, CROWDED, negative=False), 6, config.dimension):
        before = table.look_up(ids)
        said = table.update(ids, gradient, step, keeps=True)
        assert said is not None
        assert torch.equal(said, before)
        assert not torch.equal(table.look_up(ids), before) or config.admission is not None
