"""`DistributedEmbedding` is called as ``torch.nn.Embedding``, and refuses what tables on servers cannot."""

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
        ({"name": "users", "options": {"lr": 1.0}}, "has options .lr. and no rule"),
    ],
    ids=["max-norm", "no-name", "padding", "options"],
)
def test_what_cannot_be_honoured_is_refused_by_name(options, words):
    with pytest.raises(ConfigurationError, match=words):
        fleet.nn.DistributedEmbedding(10, 2, **options)


def test_a_shared_table_of_another_size_is_refused():
    first = fleet.nn.DistributedEmbedding(10, 2, name="users")
    with pytest.raises(
        ConfigurationError, match=r"has 10 embeddings of dimension 2, and the module .* 10 of 3"
    ):
        fleet.nn.DistributedEmbedding(10, 3, table=first.table)


def test_a_negative_padding_index_counts_from_the_end():
    assert fleet.nn.DistributedEmbedding(10, 2, padding_idx=-1, name="users").padding_idx == 9


def test_a_printed_model_says_what_the_table_is():
    assert "DistributedEmbedding(10, 2, name='users')" in repr(
        fleet.nn.DistributedEmbedding(10, 2, name="users")
    )
