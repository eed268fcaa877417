"""Embedding bags with tables on the parameter servers: one table, or a collection for many features.

A collection has TorchRec's interface.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module, ParameterList
from torch.nn.functional import embedding_bag

from fleet.errors import ConfigurationError
from fleet.nn.embedding import DistributedEmbedding, DistributedTable, sum_at, sums_here
from fleet.tables.first_values import FirstValues, Normal, Uniform
from fleet.tables.rules import RowRule

__all__ = [
    "DistributedEmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "KeyedIds",
    "KeyedTensor",
    "offsets_of",
    "pool",
]

_MODES = ("sum", "mean", "max")
_POOLING = {"SUM": "sum", "MEAN": "mean"}


class DistributedEmbeddingBag(DistributedEmbedding):
    """A replacement for ``torch.nn.EmbeddingBag`` with a table on the parameter servers.

    Parameters
    ----------
    num_embeddings, embedding_dim, max_norm
        As for `DistributedEmbedding`.
    scale_grad_by_freq : bool
        Not supported, because the frequencies in other trainers' batches are not known.
    mode : str
        ``mean``, ``sum`` or ``max``.
    include_last_offset : bool
        Whether offsets include the end of the last bag.
    padding_idx : int, optional
        As for `DistributedEmbedding`; padding is left out of bags.
    name, first_values, seed, rule, options, table
        As for `DistributedEmbedding`.

    Raises
    ------
    ConfigurationError
        An option is not supported; the message names it.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        *,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        name: str = "",
        first_values: FirstValues | None = None,
        seed: int = 0,
        rule: RowRule | None = None,
        options: Mapping[str, Any] | None = None,
        table: DistributedTable | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            name=name,
            first_values=first_values,
            seed=seed,
            rule=rule,
            options=options,
            table=table,
        )
        if mode not in _MODES:
            raise ConfigurationError(
                f"table {self.table.name}: mode is {mode!r}, expected one of {', '.join(_MODES)}"
            )
        if scale_grad_by_freq:
            raise ConfigurationError(
                f"table {self.table.name}: scale_grad_by_freq=True would need the frequency of each id in "
                "the batches of all trainers; expected False"
            )
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return one vector for each bag of ids.

        Parameters
        ----------
        ids : int64 or int32, [num_ids] or [bags, ids_per_bag]
        offsets : int64[bags], optional
            The start of each bag in one-dimensional ids.
        per_sample_weights : float32, same shape as `ids`, optional
            With ``sum`` only.

        Returns
        -------
        float32[bags, embedding_dim]

        Raises
        ------
        ConfigurationError
            An id is out of range; the message names the table, the id and its position in the batch.
        ValueError
            Ids, offsets and weights do not match; the message is torch's.
        """
        rows, positions = self.table.look_up(ids, padding=self.padding_idx)
        return pool(
            rows,
            positions,
            offsets.long() if offsets is not None else None,
            self.mode,
            weights=per_sample_weights,
            padding=_row_of(ids, positions, self.padding_idx),
            include_last_offset=self.include_last_offset,
        )

    def extra_repr(self) -> str:
        """Return the arguments that ``print(model)`` shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _row_of(ids: Tensor, positions: Tensor, padding_idx: int | None) -> int | None:
    """Return the position of the padding id's row among a batch's rows, or None if it is not in the batch."""
    if padding_idx is None or not (padded := ids == padding_idx).any():
        return None
    return int(positions[padded][0])


def pool(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor | None,
    mode: str,
    *,
    weights: Tensor | None = None,
    padding: int | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """Return one vector for each bag; the gradient of `rows` is summed per row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64[num_ids] or int64[bags, ids_per_bag]
        The row of each id.
    offsets : int64[bags], optional
        The start of each bag in one-dimensional `positions`; with `include_last_offset` also the end of the
        last.
    mode : str
        ``sum``, ``mean`` or ``max``.
    weights : float, same shape as `positions`, optional
        Factors of the rows; with ``sum`` only.
    padding : int, optional
        A row that is left out of bags and means.
    include_last_offset : bool

    Returns
    -------
    float[bags, dimension]
        0 for an empty bag.
    """
    if not rows.shape[0]:
        # All bags of the batch are empty, and torch refuses a table without rows.
        rows = rows.new_zeros(1, rows.shape[1])
    if mode == "sum" and weights is None and sums_here(rows):
        pooled: Tensor = _Sum.apply(rows, positions, offsets, include_last_offset, padding)
        return pooled
    return embedding_bag(
        positions,
        rows,
        offsets,
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the start of each bag, followed by the end of the last one; int64[bags + 1].

    Raises
    ------
    ConfigurationError
        A length is negative.
    """
    if lengths.numel() and int(lengths.min()) < 0:
        raise ConfigurationError(f"a bag has the length {int(lengths.min())}, expected 0 or more")
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


class _Sum(torch.autograd.Function):
    """Sums rows by bag; unlike torch's sum, its backward pass does not sort the ids again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        positions: Tensor,
        offsets: Tensor | None,
        include_last_offset: bool,
        padding: int | None,
    ) -> Tensor:
        pooled = embedding_bag(
            positions,
            rows,
            offsets,
            mode="sum",
            include_last_offset=include_last_offset,
            padding_idx=padding,
        )
        ctx.save_for_backward(positions.reshape(-1), _bags_of(positions, offsets, len(pooled)))
        ctx.padding, ctx.num_rows = padding, len(rows)
        return pooled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (positions, bags), (gradient,) = ctx.saved_tensors, gradients
        # With include_last_offset, positions after the last offset are in no bag.
        positions = positions[: len(bags)]
        if ctx.padding is not None:
            kept = positions != ctx.padding
            positions, bags = positions[kept], bags[kept]
        by_position = gradient.contiguous().index_select(0, bags)
        return sum_at(positions, by_position, ctx.num_rows), *[None] * 4


def _bags_of(positions: Tensor, offsets: Tensor | None, num_bags: int) -> Tensor:
    """Return each id's bag as int64[num_ids]."""
    bags = torch.arange(num_bags, device=positions.device)
    if offsets is None:
        return bags.repeat_interleave(positions.shape[1])
    ends = positions.new_full((num_bags + 1,), positions.numel(), dtype=torch.int64)
    ends[: len(offsets)] = offsets
    return bags.repeat_interleave(ends.diff())


class KeyedIds(Protocol):
    """A batch of ids by feature, such as TorchRec's ``KeyedJaggedTensor``.

    It also has ``lengths()``, the length of each bag, ordered by feature, or ``offsets()``, their running
    sums from 0.
    """

    def keys(self) -> Sequence[str]:
        """Return the names of the features."""

    def values(self) -> Tensor:
        """Return the ids of all features as int64[num_ids], one bag after another."""

    def weights_or_none(self) -> Tensor | None:
        """Return the weight of each id as float32[num_ids], or None."""


class KeyedTensor:
    """Named vectors, concatenated in one tensor, with the methods of TorchRec's class of the same name.

    Parameters
    ----------
    keys : sequence of str
    length_per_key : sequence of int
        Width of each name's vectors.
    values : float[batch, sum of the lengths]
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys = list(keys)
        self._lengths = list(length_per_key)
        self._values = values

    def keys(self) -> list[str]:
        """Return the names of the vectors."""
        return self._keys

    def values(self) -> Tensor:
        """Return all vectors as float[batch, sum of the lengths]."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which the vectors are concatenated."""
        return 1

    def length_per_key(self) -> list[int]:
        """Return the width of each name's vectors."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """Return the start of each name's vectors, followed by the end of the last name's."""
        return [0, *torch.tensor(self._lengths).cumsum(0).tolist()]

    def to_dict(self) -> dict[str, Tensor]:
        """Return each name's vectors as a view of the values; float[batch, length]."""
        return dict(zip(self._keys, torch.split(self._values, self._lengths, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        """Return the vectors of a name."""
        return self.to_dict()[key]

    @staticmethod
    def regroup(keyed: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Concatenate the vectors of each group of names.

        Parameters
        ----------
        keyed : sequence of KeyedTensor
            All of one batch.
        groups : sequence of sequences of str
            Names in any of `keyed`.

        Returns
        -------
        list of Tensor
            For each group float32[batch, sum of its lengths].

        Raises
        ------
        KeyError
            A name is unknown.
        """
        named: Mapping[str, Any] = {name: value for each in keyed for name, value in each.to_dict().items()}
        return [torch.cat([named[name] for name in group], dim=1) for group in groups]


@dataclass
class EmbeddingBagConfig:
    """The configuration of one table in a collection, with TorchRec's field names.

    Attributes
    ----------
    num_embeddings : int, optional
        Ids are 0 to `num_embeddings`, exclusive. None: any 64-bit id is valid.
    embedding_dim : int
    name : str
    feature_names : list of str
        The features that read the table.
    pooling : str
        ``SUM`` or ``MEAN``, or an enumeration member of that name.
    weight_init_min, weight_init_max : float, optional
        First values are uniform between these. By default the bounds are -1 and 1 divided by the square root
        of `num_embeddings`; without `num_embeddings`, first values are normal.
    first_values : FirstValues, optional
        Used instead of the two bounds.
    rule : RowRule, optional
        The rule that updates rows; by default, rows are updated as the optimizer would.
    options : dict
        Options of `rule`.
    table : DistributedTable, optional
        A table with further options; it replaces all of the above except `feature_names` and `pooling`.
    """

    num_embeddings: int | None = None
    embedding_dim: int = 0
    name: str = ""
    feature_names: list[str] = field(default_factory=list)
    pooling: Any = "SUM"
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    first_values: FirstValues | None = None
    rule: RowRule | None = None
    options: dict[str, Any] = field(default_factory=dict)
    table: DistributedTable | None = None


class EmbeddingBagCollection(Module):
    """A replacement for ``torchrec.EmbeddingBagCollection`` with tables on the parameter servers.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        TorchRec's own configs are accepted too.
    is_weighted : bool
        Whether each id has a weight.
    device : torch.device, optional
        Ignored: rows are moved to the device of the ids.

    Raises
    ------
    ConfigurationError
        A config is not supported; the message names its table.
    """

    is_distributed = True

    def __init__(self, tables: Sequence[Any], is_weighted: bool = False, device: Any = None) -> None:
        super().__init__()
        del device
        self._configs = list(tables)
        self._is_weighted = is_weighted
        self._tables = [_table_of(config) for config in self._configs]
        self._modes = [_mode_of(config, is_weighted) for config in self._configs]
        if not self._configs:
            raise ConfigurationError("an EmbeddingBagCollection without tables, expected at least one config")
        names = Counter(table.name for table in self._tables)
        if twice := [name for name, times in names.items() if times > 1]:
            raise ConfigurationError(f"two tables are named {twice[0]!r}; give each its own name")
        self.placeholders = ParameterList([table.placeholder for table in self._tables])
        tables_of = Counter(feature for config in self._configs for feature in config.feature_names)
        self._names = [
            f"{feature}@{table.name}" if tables_of[feature] > 1 else feature
            for config, table in zip(self._configs, self._tables, strict=True)
            for feature in config.feature_names
        ]

    @property
    def distributed_tables(self) -> tuple[DistributedTable, ...]:
        """The tables of this module."""
        return tuple(self._tables)

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configurations of the collection's tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether each id has a weight."""
        return self._is_weighted

    def forward(self, features: KeyedIds) -> KeyedTensor:
        """Return one vector for each bag of each feature.

        Parameters
        ----------
        features : KeyedIds
            A ``KeyedJaggedTensor``, or an object with the same methods.

        Returns
        -------
        KeyedTensor
            By feature, in the order of the configs; a feature of several tables is named ``feature@table``.

        Raises
        ------
        ConfigurationError
            A feature or the weights are missing, lengths do not match, or an id is out of range; the message
            names table and feature.
        """
        batch = _Batch(features, self._is_weighted)
        pooled: list[Tensor] = []
        lengths: list[int] = []
        for config, table, mode in zip(self._configs, self._tables, self._modes, strict=True):
            if not config.feature_names:
                continue
            ids, offsets, weights = batch.of(config.feature_names, table.name)
            try:
                rows, positions = table.look_up(ids)
            except ConfigurationError:  # check again, feature by feature, to name the feature
                for feature, part in zip(config.feature_names, batch.ids(config.feature_names), strict=True):
                    table.check(part, feature)
                raise
            bags = pool(rows, positions, offsets, mode, weights=weights, include_last_offset=True)
            pooled.extend(bags.reshape(len(config.feature_names), batch.size, table.dimension).unbind())
            lengths.extend([table.dimension] * len(config.feature_names))
        return KeyedTensor(self._names, lengths, torch.cat(pooled, dim=1))

    def prefetch(self, features: KeyedIds) -> None:
        """Request the rows of the next batch without waiting for them; see `fleet.prefetch`.

        Parameters
        ----------
        features : KeyedIds
            The features with which the module will be called.

        Raises
        ------
        ConfigurationError
            A feature is missing, an id is out of range, or there is no session yet.
        """
        batch = _Batch(features, is_weighted=False)
        for config, table in zip(self._configs, self._tables, strict=True):
            if config.feature_names:
                table.prefetch(batch.of(config.feature_names, table.name)[0])


class _Batch:
    """A batch of ids by feature, which is split among the tables."""

    def __init__(self, features: Any, is_weighted: bool) -> None:
        self._values: Tensor = features.values()
        keys = list(features.keys())
        self._order = {key: number for number, key in enumerate(keys)}
        offsets = offsets_of(features.lengths()) if hasattr(features, "lengths") else features.offsets()
        bags = offsets.numel() - 1
        if not keys or bags < 0 or bags % len(keys):
            raise ConfigurationError(
                f"{bags} lengths of {len(keys)} features, expected one for each feature and bag"
            )
        self.size = bags // len(keys)
        self._offsets = offsets.long()
        if int(offsets[-1]) != self._values.numel():
            raise ConfigurationError(
                f"lengths of {int(offsets[-1])} ids in total, but {self._values.numel()} ids; expected equal "
                "numbers"
            )
        self._weights: Tensor | None = features.weights_or_none() if is_weighted else None
        if is_weighted and self._weights is None:
            raise ConfigurationError(
                "the collection is weighted, but the batch has no weights; expected one for each id, or "
                "is_weighted=False"
            )

    def of(self, features: Sequence[str], table: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the concatenated ids, offsets and weights of some features.

        Returns
        -------
        ids : int64[num_ids]
        offsets : int64[len(features) * size + 1]
        weights : float32[num_ids] or None
        """
        if missing := [feature for feature in features if feature not in self._order]:
            raise ConfigurationError(
                f"table {table}: the batch has no feature {missing[0]!r}, only {', '.join(self._order)}; "
                "expected every feature in the table's feature_names"
            )
        lengths = torch.cat([self._offsets_of(feature).diff() for feature in features])
        weights = None
        if self._weights is not None:
            weights = torch.cat([self._weights[self._range(feature)] for feature in features])
        return torch.cat(self.ids(features)), offsets_of(lengths), weights

    def ids(self, features: Sequence[str]) -> list[Tensor]:
        """Return the ids of each feature."""
        return [self._values[self._range(feature)] for feature in features]

    def _offsets_of(self, feature: str) -> Tensor:
        begin = self._order[feature] * self.size
        return self._offsets[begin : begin + self.size + 1]

    def _range(self, feature: str) -> slice:
        offsets = self._offsets_of(feature)
        return slice(int(offsets[0]), int(offsets[-1]))


def _table_of(config: Any) -> DistributedTable:
    """Create the table that a config of this module or of TorchRec describes."""
    if (given := getattr(config, "table", None)) is not None:
        return given  # type: ignore[no-any-return]
    first_values: FirstValues | None = getattr(config, "first_values", None)
    if first_values is None:
        first_values = _default_values(config)
    rule, options = getattr(config, "rule", None), getattr(config, "options", None)
    return DistributedTable(
        config.name,
        config.embedding_dim,
        config.num_embeddings,
        first_values,
        rule=rule,
        options=options or {},
    )


def _default_values(config: Any) -> FirstValues:
    low, high = getattr(config, "weight_init_min", None), getattr(config, "weight_init_max", None)
    if config.num_embeddings is None and (low is None or high is None):
        return Normal()
    bound = (config.num_embeddings or 1) ** -0.5
    return Uniform(-bound if low is None else low, bound if high is None else high)


def _mode_of(config: Any, is_weighted: bool) -> str:
    pooling = str(getattr(config.pooling, "name", config.pooling)).upper()
    if pooling not in _POOLING:
        raise ConfigurationError(f"table {config.name}: pooling is {pooling}, expected SUM or MEAN")
    if is_weighted and pooling != "SUM":
        raise ConfigurationError(
            f"table {config.name}: pooling is {pooling}, but the collection is weighted, which requires SUM; "
            "expected SUM"
        )
    return _POOLING[pooling]
