"""Modules whose tables live on the parameter servers only."""

from fleet.nn.collection import EmbeddingBagCollection, EmbeddingBagConfig
from fleet.nn.embedding import DistributedEmbedding
from fleet.nn.embedding_bag import DistributedEmbeddingBag
from fleet.nn.keyed import KeyedIds, KeyedTensor
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
