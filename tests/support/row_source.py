"""Rows of tables without parameter servers."""

from typing import Any

import torch

__all__ = ["RowSource"]


class RowSource:
    """Rows whose values are their ids; what has a gradient is kept."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.kept: list[Any] = []

    def look_up(self, name: str, ids: Any) -> torch.Tensor:
        """Note which ids are asked for."""
        self.asked.append(ids.tolist())
        return torch.from_numpy(ids).float()[:, None].repeat(1, 2)

    def touched(self, name: str, touched: Any) -> None:
        """Keep what has a gradient."""
        self.kept.append(touched)
