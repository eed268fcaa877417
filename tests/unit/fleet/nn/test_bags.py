"""Embedding bags beside those of torch, and collections with batches that have the calls of TorchRec's."""

from enum import Enum, unique
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import embedding_bag

import fleet
from fleet.errors import ConfigurationError
from fleet.nn import EmbeddingBagCollection, EmbeddingBagConfig
from fleet.nn.bags import offsets_of, pool
from fleet.tables import Normal, Uniform
from tests.support.row_source import RowSource

WEIGHT = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
FLAT = torch.tensor([3, 1, 3, 7, 7, 7, 0, 2, 19, 3])
BAGS = torch.tensor([[3, 1, 3], [7, 7, 0], [0, 0, 0]])


def beside_torch(**options: Any) -> tuple[Any, Any, RowSource]:
    ours = fleet.nn.DistributedEmbeddingBag(20, 4, name="users", **options)
    weight = WEIGHT.clone()
    if "padding_idx" in options:
        weight[options["padding_idx"]] = 0.0
    source = RowSource(weight)
    ours.table.bind(source)
    return ours, torch.nn.EmbeddingBag.from_pretrained(weight, freeze=False, **options), source


def check(ours: Any, theirs: Any, source: RowSource, *arguments: Any) -> None:
    weights = [each for each in arguments if each is not None and each.is_floating_point()]
    found, expected = ours(*arguments), theirs(*arguments)
    assert torch.equal(found, expected)
    towards = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    of_weights = []
    for result in (found, expected):
        (result * towards).sum().backward()
        of_weights.append([each.grad for each in weights])
        for each in weights:
            each.grad = None
    grad = torch.zeros(20, 4)
    for touched in source.kept:
        grad[torch.from_numpy(touched.ids)] += touched.gradient()
    assert torch.equal(grad, theirs.weight.grad)
    for mine, other in zip(*of_weights, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [{}, {"padding_idx": 7}], ids=["all", "padding"])
@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ((FLAT, torch.tensor([0, 2, 2, 5])), False),
        ((FLAT, torch.tensor([0, 2, 2, 5, 10])), True),
        ((BAGS,), False),
        ((FLAT.int(), torch.tensor([0, 4], dtype=torch.int32)), False),
    ],
    ids=["offsets", "last-offset", "two-dimensions", "int32"],
)
def test_values_and_gradients_are_torchs(mode, padding, arguments, last):
    check(*beside_torch(mode=mode, include_last_offset=last, **padding), *arguments)


@pytest.mark.parametrize("padding", [{}, {"padding_idx": 7}], ids=["all", "padding"])
@pytest.mark.parametrize("arguments", [(FLAT, torch.tensor([0, 2, 2, 5])), (BAGS, None)], ids=["1d", "2d"])
def test_so_they_are_with_weights_whose_gradients_are_torchs_too(padding, arguments):
    weights = torch.rand(arguments[0].shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    check(*beside_torch(mode="sum", **padding), *arguments, weights)


def test_the_mode_is_torchs_unless_told_otherwise():
    check(*beside_torch(), BAGS)


def test_bags_without_any_id_are_zero():
    ours, _, source = beside_torch(mode="mean")
    found = ours(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0, 0]))
    assert torch.equal(found, torch.zeros(3, 4))
    assert source.asked == [[]]


def test_a_batch_asks_for_its_distinct_rows_once():
    ours, _, source = beside_torch()
    ours(BAGS)
    assert source.asked == [[0, 1, 3, 7]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "median"}, "mode is 'median', expected one of sum, mean, max"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True would need the frequency"),
        ({"max_norm": 1.0}, "max_norm=1.0 would change rows"),
    ],
)
def test_a_bag_that_cannot_be_is_refused_by_name(options, words):
    with pytest.raises(ConfigurationError, match=f"table users: {words}"):
        fleet.nn.DistributedEmbeddingBag(20, 4, name="users", **options)


def test_a_bag_and_an_embedding_may_share_a_table():
    first = fleet.nn.DistributedEmbedding(20, 4, name="users")
    bag = fleet.nn.DistributedEmbeddingBag(20, 4, table=first.table)
    assert bag.distributed_tables == first.distributed_tables
    assert "DistributedEmbeddingBag(20, 4, name='users', mode='mean')" in repr(bag)


@given(
    bags=st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6),
    mode=st.sampled_from(["sum", "mean"]),
    padding=st.one_of(st.none(), st.integers(0, 9)),
)
def test_any_bags_are_pooled_and_give_gradients_as_in_the_whole_table(bags, mode, padding):
    table: Any = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.tensor([id_ for bag in bags for id_ in bag], dtype=torch.int64)
    offsets = offsets_of(torch.tensor([len(bag) for bag in bags]))
    distinct, positions = ids.unique(return_inverse=True)
    rows: Any = table.detach()[distinct].requires_grad_()
    at = (distinct == (-1 if padding is None else padding)).nonzero()
    found = pool(
        rows,
        positions,
        offsets,
        mode,
        padding=int(at[0]) if at.numel() else None,
        include_last_offset=True,
    )
    own = embedding_bag(ids, table, offsets, mode=mode, padding_idx=padding, include_last_offset=True)
    assert torch.equal(found, own)
    if ids.numel():
        found.square().sum().backward()
        own.square().sum().backward()
        torch.testing.assert_close(rows.grad, table.grad[distinct], rtol=1e-6, atol=1e-6)


def test_a_penalty_on_the_gradient_of_sums_has_a_gradient_of_its_own():
    rows: Any = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    positions = torch.tensor([[0, 1, 1], [3, 3, 3]])
    (gradient,) = torch.autograd.grad(
        pool(rows, positions, None, "sum").pow(2).sum(), rows, create_graph=True
    )
    gradient.pow(2).sum().backward()
    times = torch.tensor([[1.0, 2, 0, 0], [0, 0, 0, 3]])
    matrix = times.T @ times  # the gradient is 2 M x, so its square has the gradient 8 M M x
    torch.testing.assert_close(rows.grad, 8 * matrix @ matrix @ rows.detach())


def test_ids_behind_a_last_offset_are_in_no_bag():
    rows: Any = torch.ones(5, 1, requires_grad=True)
    positions, offsets = torch.tensor([0, 1, 1, 4]), torch.tensor([0, 2, 3])
    pool(rows, positions, offsets, "sum", padding=1, include_last_offset=True).sum().backward()
    assert rows.grad[:, 0].tolist() == [1, 0, 0, 0, 0]


def test_bags_lie_where_their_rows_do_whatever_the_default_device():
    rows: Any = torch.ones(2, 1, requires_grad=True)
    with torch.device("meta"):
        pool(rows, torch.tensor([[0, 1]], device="cpu"), None, "sum").sum().backward()
    assert rows.grad.tolist() == [[1], [1]]


def test_a_negative_length_is_refused():
    with pytest.raises(ConfigurationError, match=r"a bag has the length -1, expected 0 or more"):
        offsets_of(torch.tensor([1, -1]))


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
