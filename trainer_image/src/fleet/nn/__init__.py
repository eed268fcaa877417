"""Modules whose embedding tables are stored only on the parameter servers."""

from fleet.nn.bags import (
    DistributedEmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedIds,
    KeyedTensor,
)
from fleet.nn.embedding import DistributedEmbedding, DistributedTable, LookedUp, RowSource

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
