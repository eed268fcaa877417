"""Modules whose embedding tables are on the parameter servers only."""

from fleet.nn.collection import EmbeddingBagCollection, EmbeddingBagConfig, KeyedIds, KeyedTensor
from fleet.nn.embedding import DistributedEmbedding, DistributedEmbeddingBag
from fleet.nn.table import DistributedTable, LookedUp, RowSource

__all__ = [
    "DistributedEmbedding",
    "DistributedEmbeddingBag",
    "DistributedTable",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "KeyedIds",
    "KeyedTensor",
    "LookedUp",
    "RowSource",
]
