"""Batches one ahead: which rows are asked for, and when."""

import pytest
import torch

import fleet
from fleet.errors import ConfigurationError
from tests.support.row_source import RowSource


def table_of(source: RowSource, padding_idx: int | None = None) -> fleet.nn.DistributedEmbedding:
    embedding = fleet.nn.DistributedEmbedding(10, 2, padding_idx, name="t")
    embedding.table.bind(source)
    return embedding


def test_the_rows_of_a_batch_are_asked_for_before_the_batch_before_is_given():
    source = RowSource()
    batches = [torch.tensor(ids) for ids in ([3, 1, 3], [2], [0, 4])]
    ahead = fleet.prefetch(batches, {table_of(source, padding_idx=0): lambda ids: ids})
    assert [(ids.tolist(), list(source.ahead)) for ids in ahead] == [
        ([3, 1, 3], [[2]]),
        ([2], [[2], [4]]),
        ([0, 4], [[2], [4]]),
    ]
    assert len(ahead) == 3
    assert source.asked == []


def test_of_a_collection_the_ids_of_all_features_of_a_table_are_asked_for():
    source = RowSource()
    collection = fleet.nn.EmbeddingBagCollection(
        [
            fleet.nn.EmbeddingBagConfig(10, 2, "t", ["a", "c"]),
            fleet.nn.EmbeddingBagConfig(10, 2, "u", ["b"]),
        ]
    )
    for table in collection.distributed_tables:
        table.bind(source)

    class Features:
        def keys(self):
            return ["a", "b", "c"]

        def values(self):
            return torch.tensor([5, 6, 7, 5, 4])

        def lengths(self):
            return torch.tensor([1, 1, 1, 0, 1, 1])

    for features in fleet.prefetch([Features()] * 2, {collection: lambda features: features}):
        collection(features)
    assert source.ahead * 2 == source.asked == [[4, 5, 6], [7]] * 2


def test_no_batches_ask_for_nothing():
    source = RowSource()
    assert list(fleet.prefetch([], {table_of(source): lambda ids: ids})) == source.ahead == []


def test_an_embedding_whose_rows_trainers_hold_is_refused_by_name():
    with pytest.raises(
        ConfigurationError, match=r"Embedding has no rows to fetch; expected modules of fleet"
    ):
        fleet.prefetch([], {torch.nn.Embedding(3, 2, sparse=True): lambda ids: ids})
