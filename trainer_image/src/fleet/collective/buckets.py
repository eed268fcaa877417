"""Which gradients travel together. Pure: sizes in, groups out."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "Extent", "is_dense", "plan_buckets"]

BUCKET_BYTES = 24 << 20
FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small: it leaves while most of the backward pass is still to come."""


@dataclass(frozen=True)
class Extent:
    """One parameter as the plan sees it: only parameters of the same `kind` may share a bucket."""

    kind: Hashable
    num_bytes: int


def plan_buckets(
    extents: Sequence[Extent],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[int]]:
    """Group parameters in the order in which backward reaches them: the last one first.

    Parameters
    ----------
    extents
        The parameters, in the order of the model.
    bucket_bytes, first_bucket_bytes
        A bucket is full once it holds as much; a parameter is never divided.

    Returns
    -------
    list of lists of int
        Positions in `extents`, each exactly once. The order is the same for every trainer with the same
        model, and it is the order in which the buckets travel.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for position in reversed(range(len(extents))):
        extent = extents[position]
        members, size = open_buckets.get(extent.kind, ([], 0))
        members.append(position)
        size += extent.num_bytes
        if size >= (bucket_bytes if buckets else first_bucket_bytes):
            buckets.append(members)
            members, size = [], 0
        open_buckets[extent.kind] = (members, size)
    return buckets + [members for members, _ in open_buckets.values() if members]


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a tensor fill their memory without gaps, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
