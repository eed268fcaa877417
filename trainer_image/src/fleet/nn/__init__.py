"""Modules whose tables live on the parameter servers only."""

from fleet.nn.embedding import DistributedEmbedding
from fleet.nn.table import DistributedTable, LookedUp, RowSource

__all__ = ["DistributedEmbedding", "DistributedTable", "LookedUp", "RowSource"]
