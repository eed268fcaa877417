"""How sentences name some pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["some"]


def some(names: Sequence[str]) -> str:
    """Name the first of some pods; the sentence stays short and still while the others come."""
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
