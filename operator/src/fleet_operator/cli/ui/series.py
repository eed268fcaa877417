"""The curves of a job by metric and replica, as plain data."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Point = tuple[int, float]

SHOWN_POINTS = 1000
"""The maximum number of points of one curve in a response."""


class Series:
    """The curves of a job: points in step order for each metric and replica."""

    def __init__(self) -> None:
        self._curves: dict[str, dict[str, list[Point]]] = {}

    def add(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step to the curves that end before this step."""
        for metric, value in values.items():
            curve = self._curves.setdefault(metric, {}).setdefault(replica, [])
            if not curve or curve[-1][0] < step:
                curve.append((step, value))

    def drop(self, replica: str, step: int) -> None:
        """Drop a replica's points from a step on, because a restarted replica repeats them."""
        for curves in self._curves.values():
            if (curve := curves.get(replica)) is not None:
                del curve[bisect_left(curve, step, key=lambda point: point[0]) :]

    def thinned(self, count: int = SHOWN_POINTS) -> dict[str, dict[str, Sequence[Point]]]:
        """Return all curves, each with at most `count` points."""
        return {
            metric: {replica: thin(curve, count) for replica, curve in sorted(curves.items())}
            for metric, curves in sorted(self._curves.items())
        }


def thin(curve: Sequence[Point], count: int) -> Sequence[Point]:
    """Return at most `count` points of a curve, keeping the minimum and maximum of each section.

    Parameters
    ----------
    curve : sequence of (step, value)
    count : int
        At least 4.
    """
    if len(curve) <= count:
        return curve
    parts = count // 2 - 1
    kept = [curve[0]]
    for part in range(parts):
        piece = curve[part * len(curve) // parts : (part + 1) * len(curve) // parts]
        low, high = min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])
        kept += sorted({low, high})
    return sorted({*kept, curve[-1]})
