"""`EmbeddingBagCollection` beside bags of torch, with batches that have the calls of TorchRec's."""

from enum import Enum, unique
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import embedding_bag

import fleet
from fleet.errors import ConfigurationError
from fleet.nn import EmbeddingBagCollection, EmbeddingBagConfig
from fleet.tables import Normal, Uniform
from tests.support.row_source import RowSource

LENGTHS = {"a": [2, 0, 1], "b": [1, 1, 1], "c": [0, 3, 0]}
VALUES = {"a": [3, 3, 9], "b": [3, 0, 1], "c": [5, 6, 5]}


class Jagged:
    """Ids by feature, as TorchRec's ``KeyedJaggedTensor`` hands them out."""

    def __init__(self, features: str = "abc", weighted: bool = False, **changed: Any) -> None:
        self.features = list(features)
        self.ids = torch.tensor([id_ for each in features for id_ in VALUES[each]])
        self.sizes = torch.tensor([size for each in features for size in LENGTHS[each]], dtype=torch.int32)
        self.weights = torch.arange(1.0, self.ids.numel() + 1) if weighted else None
        vars(self).update(changed)

    def keys(self) -> list[str]:
        return self.features

    def values(self) -> torch.Tensor:
        return self.ids

    def lengths(self) -> torch.Tensor:
        return self.sizes

    def weights_or_none(self) -> torch.Tensor | None:
        return self.weights


class ByOffsets:
    """The same with offsets alone."""

    def __init__(self, jagged: Jagged) -> None:
        self.keys, self.values, self.weights_or_none = jagged.keys, jagged.values, jagged.weights_or_none
        self.ends = torch.cat([torch.zeros(1, dtype=torch.int64), jagged.sizes.cumsum(0)])

    def offsets(self) -> torch.Tensor:
        return self.ends


@unique
class PoolingType(Enum):
    SUM = "SUM"
    MEAN = "MEAN"


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name="first", embedding_dim=2, num_embeddings=10, feature_names=["a", "c"], pooling="MEAN"
        ),
        EmbeddingBagConfig(
            name="second",
            embedding_dim=3,
            num_embeddings=10,
            feature_names=["b", "a"],
            pooling=PoolingType.SUM,
        ),
    ]


def made() -> tuple[EmbeddingBagCollection, list[Any]]:
    sources: list[Any] = []
    collection = EmbeddingBagCollection(configs())
    for seed, table in enumerate(collection.distributed_tables):
        weight = torch.randn(10, table.dimension, generator=torch.Generator().manual_seed(seed))
        sources.append(RowSource(weight))
        table.bind(sources[-1])
    return collection, sources


def expected(weights: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what bags of torch give, one for each feature and table."""
    found = {}
    for number, (weight, config) in enumerate(zip(weights, configs(), strict=True)):
        for feature in config.feature_names:
            found[f"{feature}@{config.name}" if feature == "a" else feature] = embedding_bag(
                torch.tensor(VALUES[feature]),
                weight,
                torch.tensor([0, *LENGTHS[feature]]).cumsum(0),
                mode=("mean", "sum")[number],
                include_last_offset=True,
            )
    return found


@pytest.mark.parametrize("shape", [Jagged, lambda: ByOffsets(Jagged()), lambda: Jagged("cab")])
def test_each_feature_has_the_vectors_and_gradients_of_a_bag_of_torch(shape):
    collection, sources = made()
    weights: list[Any] = [source.weight.clone().requires_grad_() for source in sources]
    found, own = collection(shape()), expected(weights)
    assert found.keys() == ["a@first", "c", "b", "a@second"] == list(own)
    assert found.length_per_key() == [2, 2, 3, 3]
    assert found.offset_per_key() == [0, 2, 4, 7, 10]
    assert torch.equal(found.values(), torch.cat(list(own.values()), dim=1))
    assert all(torch.equal(found[name], own[name]) for name in own)
    (found.values() * torch.arange(10.0)).sum().backward()
    (torch.cat(list(own.values()), dim=1) * torch.arange(10.0)).sum().backward()
    for source, weight in zip(sources, weights, strict=True):
        (touched,) = source.kept
        torch.testing.assert_close(touched.gradient(), weight.grad[torch.from_numpy(touched.ids)])


def test_a_table_is_asked_once_for_all_of_its_features():
    collection, sources = made()
    collection(Jagged())
    assert [source.asked for source in sources] == [[[3, 5, 6, 9]], [[0, 1, 3, 9]]]


def test_weights_multiply_what_is_summed():
    collection = EmbeddingBagCollection(configs()[1:], is_weighted=True)
    [table] = collection.distributed_tables
    weight = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    table.bind(RowSource(weight))
    found = collection(Jagged(weighted=True))
    scales = torch.arange(1.0, 7.0)[:, None]
    torch.testing.assert_close(found["b"], weight[VALUES["b"]] * scales[3:6])
    [one, two, three] = weight[VALUES["a"]] * scales[:3]
    torch.testing.assert_close(found["a"], torch.stack([one + two, torch.zeros(3), three]))


def test_what_a_model_asks_of_torchs_collection_is_answered():
    collection, _ = made()
    assert [config.name for config in collection.embedding_bag_configs()] == ["first", "second"]
    assert not collection.is_weighted()
    assert len(list(collection.parameters())) == 2
    assert EmbeddingBagCollection(tables=configs(), device=torch.device("meta")).distributed_tables


def test_vectors_of_several_collections_are_put_together_by_name():
    collection, _ = made()
    found = collection(Jagged())
    [one, two] = fleet.nn.KeyedTensor.regroup([found], [["b", "c"], ["a@first"]])
    assert torch.equal(one, torch.cat([found["b"], found["c"]], dim=1))
    assert torch.equal(two, found["a@first"])


def test_rows_begin_as_torchrec_begins_them_unless_told_otherwise():
    begun = [
        EmbeddingBagConfig(100, 2, "even"),
        EmbeddingBagConfig(100, 2, "given", weight_init_min=-1.0, weight_init_max=2.0),
        EmbeddingBagConfig(None, 2, "unbounded"),
        EmbeddingBagConfig(100, 2, "own", first_values=Normal(1.0)),
    ]
    tables = EmbeddingBagCollection(begun).distributed_tables
    assert [table.first_values for table in tables] == [
        Uniform(-0.1, 0.1),
        Uniform(-1.0, 2.0),
        Normal(),
        Normal(1.0),
    ]


def test_a_config_of_torchrec_is_taken_as_it_is():
    config = SimpleNamespace(
        num_embeddings=10, embedding_dim=2, name="t", feature_names=["a"], pooling=PoolingType.MEAN
    )
    assert EmbeddingBagCollection([config]).distributed_tables[0].name == "t"


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (Jagged("ab"), r"table first: the batch has no feature 'c', only a, b"),
        (Jagged(sizes=torch.tensor([1] * 8)), r"8 lengths of 3 features"),
        (Jagged(sizes=torch.tensor([1] * 6)), r"lengths of 6 ids in total, but 9 ids"),
        (
            Jagged(ids=torch.tensor([3, 3, 9, 3, 0, 1, 5, 66, 5])),
            r"table first, feature c: id 66 at position \[1\]",
        ),
    ],
    ids=["missing", "odd", "short", "out-of-range"],
)
def test_a_batch_that_cannot_be_is_refused(batch, words):
    with pytest.raises(ConfigurationError, match=words):
        made()[0](batch)


def test_a_weighted_collection_wants_weights():
    with pytest.raises(ConfigurationError, match=r"the batch has no weights"):
        EmbeddingBagCollection(configs()[1:], is_weighted=True)(Jagged())


def test_a_mean_takes_no_weights():
    with pytest.raises(ConfigurationError, match=r"table first: pooling is MEAN, but the collection is wei"):
        EmbeddingBagCollection(configs(), is_weighted=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([], "without tables"),
        ([EmbeddingBagConfig(10, 2, "t"), EmbeddingBagConfig(10, 2, "t")], "two tables are named 't'"),
        ([EmbeddingBagConfig(10, 2, "t", pooling="NONE")], "table t: pooling is NONE, expected SUM or MEAN"),
    ],
)
def test_a_collection_that_cannot_be_is_refused(changed, words):
    with pytest.raises(ConfigurationError, match=words):
        EmbeddingBagCollection(changed)


def test_a_batch_of_no_bags_has_no_vectors():
    collection = EmbeddingBagCollection([EmbeddingBagConfig(10, 2, "t", ["a", "b"])])
    collection.distributed_tables[0].bind(RowSource())
    none = torch.zeros(0, dtype=torch.int64)
    vectors = collection(Jagged("ab", ids=none, sizes=none)).to_dict()
    assert {name: tuple(each.shape) for name, each in vectors.items()} == {"a": (0, 2), "b": (0, 2)}


def test_a_feature_of_several_tables_is_named_by_tables_that_are_given_too():
    tables = [fleet.nn.DistributedTable(name, 2, 10) for name in ("users", "items")]
    collection = EmbeddingBagCollection(
        [EmbeddingBagConfig(feature_names=["a"], table=each) for each in tables]
    )
    for table in tables:
        table.bind(RowSource())
    assert collection(Jagged("a")).keys() == ["a@users", "a@items"]
