"""Streaming data sets for the click-through-rate examples."""

from fleet.datasets.criteo import CriteoFiles

__all__ = ["CriteoFiles"]
