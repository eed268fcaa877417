"""Table rows without parameter servers."""

from typing import Any

import torch

__all__ = ["RowSource"]


class RowSource:
    """Rows of a weight, or rows whose values are their ids; stores the gradients."""

    def __init__(self, weight: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.asked: list[list[int]] = []
        self.ahead: list[list[int]] = []
        self.kept: list[Any] = []

    def fetch(self, name: str, ids: Any) -> torch.Tensor:
        """Record the requested ids."""
        self.asked.append(ids.tolist())
        if self.weight is not None:
            return self.weight[torch.from_numpy(ids)]
        return torch.from_numpy(ids).float()[:, None].repeat(1, 2)

    def prefetch(self, name: str, ids: Any) -> None:
        """Record the prefetched ids."""
        self.ahead.append(ids.tolist())

    def touched(self, name: str, touched: Any) -> None:
        """Store the rows that have a gradient."""
        self.kept.append(touched)
