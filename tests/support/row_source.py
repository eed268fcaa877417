"""A source of table rows that needs no parameter servers."""

from typing import Any

import torch

__all__ = ["RowSource"]


class RowSource:
    """A source that serves the rows of a weight, or rows whose values are their ids."""

    def __init__(self, weight: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.asked: list[list[int]] = []
        self.ahead: list[list[int]] = []
        self.kept: list[Any] = []

    def fetch(self, name: str, ids: Any) -> torch.Tensor:
        """Record the requested ids and return their rows."""
        self.asked.append(ids.tolist())
        if self.weight is not None:
            return self.weight[torch.from_numpy(ids)]
        return torch.from_numpy(ids).float()[:, None].repeat(1, 2)

    def prefetch(self, name: str, ids: Any) -> None:
        """Record the ids of a prefetch request."""
        self.ahead.append(ids.tolist())

    def touched(self, name: str, touched: Any) -> None:
        """Store a row gradient."""
        self.kept.append(touched)
