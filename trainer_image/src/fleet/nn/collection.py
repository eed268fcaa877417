"""Bags of many features from tables on the parameter servers, in the place of TorchRec's collection."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ParameterList

from fleet.errors import ConfigurationError
from fleet.nn.keyed import KeyedIds, KeyedTensor
from fleet.nn.pooling import offsets_of, pool
from fleet.nn.table import DistributedTable
from fleet.tables.first_values import FirstValues, Normal, Uniform
from fleet.tables.rules import RowRule

__all__ = ["EmbeddingBagCollection", "EmbeddingBagConfig"]

_POOLING = {"SUM": "sum", "MEAN": "mean"}


@dataclass
class EmbeddingBagConfig:
    """One table of a collection, with the names that TorchRec gives its fields.

    Attributes
    ----------
    num_embeddings : int, optional
        Ids are below it and not negative. None: any 64-bit id is one.
    embedding_dim : int
    name : str
    feature_names : list of str
        The features that read the table.
    pooling : str
        ``SUM`` or ``MEAN``, or a member of an enumeration of that name.
    weight_init_min, weight_init_max : float, optional
        First values are even between these; without them between -1 and 1 divided by the square root of
        `num_embeddings`, or normal where these are not bounded.
    first_values : FirstValues, optional
        In place of the two above.
    rule : RowRule, optional
        What an update does to a row; otherwise what the optimizer says.
    options : dict
        Of `rule`.
    table : DistributedTable, optional
        What else a table may be; then it says all but `feature_names` and `pooling`.
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
    """In place of ``torchrec.EmbeddingBagCollection``: the same call, and no row of a table on a trainer.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        TorchRec's own are taken too.
    is_weighted : bool
        Whether each id has a weight.
    device : torch.device, optional
        Not looked at: rows come to the device of the ids.

    Raises
    ------
    ConfigurationError
        A table cannot be as its config says; the message names it.
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
            raise ConfigurationError("an EmbeddingBagCollection of no tables, expected at least one config")
        names = Counter(table.name for table in self._tables)
        if twice := [name for name, times in names.items() if times > 1]:
            raise ConfigurationError(f"two tables are named {twice[0]!r}; each needs a name of its own")
        self.placeholders = ParameterList([table.placeholder for table in self._tables])
        tables_of = Counter(feature for config in self._configs for feature in config.feature_names)
        self._names = [
            f"{feature}@{table.name}" if tables_of[feature] > 1 else feature
            for config, table in zip(self._configs, self._tables, strict=True)
            for feature in config.feature_names
        ]

    @property
    def distributed_tables(self) -> tuple[DistributedTable, ...]:
        """The tables of this module, which are on the servers."""
        return tuple(self._tables)

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configs that the collection was made of."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether each id has a weight."""
        return self._is_weighted

    def forward(self, features: KeyedIds) -> KeyedTensor:
        """Return a vector for each feature and bag.

        Parameters
        ----------
        features : KeyedIds
            A ``KeyedJaggedTensor``, or what has the same calls.

        Returns
        -------
        KeyedTensor
            By feature, in the order of the configs; a feature of several tables is named ``feature@table``.

        Raises
        ------
        ConfigurationError
            A feature or the weights are missing, lengths do not go together, or an id is out of range; the
            message names table and feature.
        """
        batch = _Batch(features, self._is_weighted)
        pooled: list[Tensor] = []
        lengths: list[int] = []
        for config, table, mode in zip(self._configs, self._tables, self._modes, strict=True):
            if not config.feature_names:
                continue
            ids, offsets, weights = batch.of(config.feature_names, table.name)
            for feature, part in zip(config.feature_names, batch.ids(config.feature_names), strict=True):
                table.check(part, feature)
            rows, positions = table.look_up(ids)
            bags = pool(rows, positions, offsets, mode, weights=weights, include_last_offset=True)
            pooled.extend(bags.reshape(len(config.feature_names), batch.size, table.dimension).unbind())
            lengths.extend([table.dimension] * len(config.feature_names))
        return KeyedTensor(self._names, lengths, torch.cat(pooled, dim=1))

    def prefetch(self, features: KeyedIds) -> None:
        """Ask for the rows with which this module is called for the next batch; see `fleet.prefetch`.

        Parameters
        ----------
        features : KeyedIds
            Of the next batch.

        Raises
        ------
        ConfigurationError
            A feature is missing, an id is out of range, or nothing serves the tables yet.
        """
        batch = _Batch(features, is_weighted=False)
        for config, table in zip(self._configs, self._tables, strict=True):
            if config.feature_names:
                table.prefetch(batch.of(config.feature_names, table.name)[0])


class _Batch:
    """A batch of ids by feature, cut into the parts of tables."""

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
                f"lengths of {int(offsets[-1])} ids in all, and {self._values.numel()} ids; expected as many"
            )
        self._weights: Tensor | None = features.weights_or_none() if is_weighted else None
        if is_weighted and self._weights is None:
            raise ConfigurationError(
                "the collection is weighted, and the batch has no weights; expected one for each id, or "
                "is_weighted=False"
            )

    def of(self, features: Sequence[str], table: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the ids, offsets and weights of some features, one after the other.

        Returns
        -------
        ids : int64[num_ids]
        offsets : int64[len(features) * size + 1]
        weights : float32[num_ids] or None
        """
        if missing := [feature for feature in features if feature not in self._order]:
            raise ConfigurationError(
                f"table {table}: the batch has no feature {missing[0]!r}; expected it beside "
                f"{', '.join(self._order)}"
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
    """Return the table that a config describes: ours, or TorchRec's."""
    if (given := getattr(config, "table", None)) is not None:
        return given  # type: ignore[no-any-return]
    first_values: FirstValues | None = getattr(config, "first_values", None)
    if first_values is None:
        first_values = _even_between(config)
    rule, options = getattr(config, "rule", None), getattr(config, "options", None)
    return DistributedTable(
        config.name,
        config.embedding_dim,
        config.num_embeddings,
        first_values,
        rule=rule,
        options=options or {},
    )


def _even_between(config: Any) -> FirstValues:
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
            f"table {config.name}: pooling is {pooling}, and the collection is weighted; weights multiply "
            "what is summed, so expected SUM"
        )
    return _POOLING[pooling]
