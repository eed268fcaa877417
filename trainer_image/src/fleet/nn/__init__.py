"""Modules whose embedding tables exist only on the parameter servers."""

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
