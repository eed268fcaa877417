"""Embedding tables: rows by id, their initial values, and the rules that update, admit and evict rows."""

from fleet.tables.admission import BloomFilter, CountFilter, Probability
from fleet.tables.config import BFloat16, Float32, TableConfig
from fleet.tables.eviction import LeastRecentlyUsed, LowestScore, TimeToLive
from fleet.tables.first_values import Constant, FirstValues, Normal, Uniform
from fleet.tables.gradients import RowGradients, merge
from fleet.tables.ids import Placement
from fleet.tables.rows import TableRows
from fleet.tables.storage import LocalDisk, Memory
from fleet.tables.table import Table

__all__ = [
    "BFloat16",
    "BloomFilter",
    "Constant",
    "CountFilter",
    "FirstValues",
    "Float32",
    "LeastRecentlyUsed",
    "LocalDisk",
    "LowestScore",
    "Memory",
    "Normal",
    "Placement",
    "Probability",
    "RowGradients",
    "Table",
    "TableConfig",
    "TableRows",
    "TimeToLive",
    "Uniform",
    "merge",
]
