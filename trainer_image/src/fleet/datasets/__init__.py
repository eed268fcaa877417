"""Data sets that the examples of click-through models read, by streaming."""

from fleet.datasets.criteo import CriteoFiles

__all__ = ["CriteoFiles"]
