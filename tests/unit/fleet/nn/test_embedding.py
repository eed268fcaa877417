"""`DistributedEmbedding` and `DistributedEmbeddingBag` beside torch's modules."""

from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigurationError
from tests.support.row_source import RowSource


def test_an_embedding_has_the_shape_and_the_gradients_of_torchs():
    module = fleet.nn.DistributedEmbedding(10, 2, name="users")
    source = RowSource()
    module.table.bind(source)
    own: Any = torch.nn.Embedding.from_pretrained(
        torch.arange(10.0)[:, None].repeat(1, 2), freeze=False, sparse=True
    )
    ids, weight = torch.tensor([[3, 1, 3], [7, 7, 7]]), torch.rand(2, 3, 2)
    found, expected = module(ids), own(ids)
    assert torch.equal(found, expected)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    grad = own.weight.grad.coalesce()
    assert source.kept[0].ids.tolist() == grad.indices()[0].tolist()
    assert torch.equal(source.kept[0].gradient(), grad.values())


def test_two_modules_may_share_a_table():
    first = fleet.nn.DistributedEmbedding(10, 2, name="users")
    second = fleet.nn.DistributedEmbedding(10, 2, table=first.table)
    assert list(torch.nn.ModuleList([first, second]).parameters()) == [first.placeholder]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": 1.0, "name": "users"}, "table users: max_norm=1.0 would change rows"),
        ({}, "a table has no name"),
        ({"padding_idx": 10, "name": "users"}, "table users: padding_idx is 10, expected -10 to 9"),
        ({"name": "users", "options": {"lr": 1.0}}, "has options .lr. but no rule"),
    ],
    ids=["max-norm", "no-name", "padding", "options"],
)
def test_what_cannot_be_honoured_is_refused_by_name(options, words):
    with pytest.raises(ConfigurationError, match=words):
        fleet.nn.DistributedEmbedding(10, 2, **options)


def test_a_shared_table_of_another_size_is_refused():
    first = fleet.nn.DistributedEmbedding(10, 2, name="users")
    with pytest.raises(
        ConfigurationError, match=r"has 10 embeddings of dimension 2, but the module .* 10 of 3"
    ):
        fleet.nn.DistributedEmbedding(10, 3, table=first.table)


def test_a_negative_padding_index_counts_from_the_end():
    assert fleet.nn.DistributedEmbedding(10, 2, padding_idx=-1, name="users").padding_idx == 9


def test_a_printed_model_says_what_the_table_is():
    assert "DistributedEmbedding(10, 2, name='users')" in repr(
        fleet.nn.DistributedEmbedding(10, 2, name="users")
    )


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
