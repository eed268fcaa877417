"""Eviction rules: which rows go. One of one's own is a class that has what `Eviction` says."""

from fleet.tables.eviction.interface import Eviction, ShardRows, Touched
from fleet.tables.eviction.least_recent import LeastRecentlyUsed
from fleet.tables.eviction.lowest_score import LowestScore
from fleet.tables.eviction.time_to_live import TimeToLive

__all__ = ["Eviction", "LeastRecentlyUsed", "LowestScore", "ShardRows", "TimeToLive", "Touched"]
