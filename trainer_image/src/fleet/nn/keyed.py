"""Ids by feature, and embeddings by feature, in the shapes that TorchRec gives them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["KeyedIds", "KeyedTensor"]


class KeyedIds(Protocol):
    """What a batch of ids by feature says: TorchRec's ``KeyedJaggedTensor`` does.

    It has ``lengths()``, one for each feature and bag, features first, or ``offsets()``, their running sums
    from 0 on.
    """

    def keys(self) -> Sequence[str]:
        """Return the features."""

    def values(self) -> Tensor:
        """Return the ids of all features, bag by bag; int64[num_ids]."""

    def weights_or_none(self) -> Tensor | None:
        """Return a weight for each id, or None; float32[num_ids]."""


class KeyedTensor:
    """Vectors by name, side by side in one tensor, with the calls of TorchRec's class of this name.

    Parameters
    ----------
    keys : sequence of str
    length_per_key : sequence of int
        How wide each one's vectors are.
    values : float[batch, sum of the lengths]
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys = list(keys)
        self._lengths = list(length_per_key)
        self._values = values

    def keys(self) -> list[str]:
        """Return the names."""
        return self._keys

    def values(self) -> Tensor:
        """Return all vectors; float[batch, sum of the lengths]."""
        return self._values

    def key_dim(self) -> int:
        """Return along which dimension of the values the names are."""
        return 1

    def length_per_key(self) -> list[int]:
        """Return how wide each name's vectors are."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """Return where each name's vectors begin, and the end."""
        return [0, *torch.tensor(self._lengths).cumsum(0).tolist()]

    def to_dict(self) -> dict[str, Tensor]:
        """Return each name's vectors, views of the values; float[batch, length]."""
        return dict(zip(self._keys, torch.split(self._values, self._lengths, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        """Return the vectors of a name."""
        return self.to_dict()[key]

    @staticmethod
    def regroup(keyed: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return the vectors of each group of names side by side.

        Parameters
        ----------
        keyed : sequence of KeyedTensor
            Of one batch; float32[batch, lengths] each.
        groups : sequence of sequences of str
            Names, of any of them.

        Returns
        -------
        list of Tensor
            For each group float32[batch, sum of its lengths].

        Raises
        ------
        KeyError
            There is no such name.
        """
        named: Mapping[str, Any] = {name: value for each in keyed for name, value in each.to_dict().items()}
        return [torch.cat([named[name] for name in group], dim=1) for group in groups]
