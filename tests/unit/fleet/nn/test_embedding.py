"""Tables that a model reads, and `DistributedEmbedding` beside torch's module."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import embedding

import fleet
from fleet.errors import ConfigurationError
from fleet.nn import DistributedTable
from fleet.nn.embedding import take, to_device, to_host
from tests.support.row_source import RowSource


def bound(**options: Any) -> tuple[DistributedTable, RowSource]:
    table, source = DistributedTable("users", 2, 10, **options), RowSource()
    table.bind(source)
    return table, source


def test_the_distinct_rows_of_a_batch_are_looked_up_once():
    table, source = bound()
    rows, positions = table.look_up(torch.tensor([[3, 1], [3, 3]]))
    assert source.asked == [[1, 3]]
    assert rows[positions][..., 0].tolist() == [[3, 1], [3, 3]]


def test_the_gradient_of_a_row_is_the_sum_over_its_places():
    table, source = bound()
    rows, positions = table.look_up(torch.tensor([3, 1, 3]))
    (rows[positions] * torch.tensor([[1.0], [10.0], [100.0]])).sum().backward()
    (touched,) = source.kept
    assert touched.ids.tolist() == [1, 3]
    assert touched.gradient().tolist() == [[10, 10], [101, 101]]


def test_a_look_up_without_gradients_is_forgotten():
    table, source = bound()
    with torch.no_grad():
        rows, _ = table.look_up(torch.tensor([3]))
    assert not rows.requires_grad
    assert source.kept == []


def test_a_padding_row_is_zero_and_neither_asked_for_nor_trained():
    table, source = bound()
    rows, positions = table.look_up(torch.tensor([0, 4, 0, 2]), padding=0)
    assert source.asked == [[2, 4]]
    assert rows[positions][:, 0].tolist() == [0, 4, 0, 2]
    rows[positions].sum().backward()
    assert source.kept[0].ids.tolist() == [2, 4]
    assert source.kept[0].gradient().shape == (2, 2)


@pytest.mark.parametrize(
    ("ids", "place"),
    [([[1, 2], [3, 10]], r"id 10 at position \[1, 1\]"), ([[1, -1]], r"id -1 at position \[0, 1\]")],
    ids=["too-large", "negative"],
)
def test_an_id_out_of_range_names_the_table_the_feature_and_its_place(ids, place):
    table, _ = bound()
    with pytest.raises(
        ConfigurationError, match=f"table users, feature city: {place} of the batch, expected 0 to 9"
    ):
        table.check(torch.tensor(ids), "city")


def test_ids_that_are_no_whole_numbers_are_refused():
    table, _ = bound()
    with pytest.raises(ConfigurationError, match=r"ids of dtype torch.float32, expected whole numbers"):
        table.look_up(torch.zeros(3))


def test_any_id_is_one_where_their_number_is_not_given():
    table, source = DistributedTable("users", 2), RowSource()
    table.bind(source)
    table.look_up(torch.tensor([-(2**62), 2**62]))
    assert source.asked == [[-(2**62), 2**62]]


def test_a_table_without_a_session_says_what_to_call():
    with pytest.raises(ConfigurationError, match=r"call fleet.init_worker\(\) before"):
        DistributedTable("users", 2).look_up(torch.tensor([1]))


def test_a_table_that_nobody_steps_is_refused():
    with pytest.raises(ConfigurationError, match="table users is in no param group of the optimizer"):
        DistributedTable("users", 2).config(torch.optim.SGD)


def test_a_table_takes_its_rule_from_the_optimizer():
    config = DistributedTable("users", 2, 10, seed=5).config(
        torch.optim.Adagrad, {"lr": 0.5, "foreach": None}
    )
    assert (type(config.rule).__name__, dict(config.options), config.seed) == ("Adagrad", {"lr": 0.5}, 5)


def test_ids_travel_as_64_bit_numbers_whatever_they_were():
    table, source = bound()
    table.look_up(torch.tensor([1], dtype=torch.int32))
    assert np.asarray(source.asked[0]).dtype == np.int64


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU on this machine")


def test_on_the_host_they_stay_where_they_are():
    rows = torch.randn(3, 2)
    assert to_device(rows, torch.device("cpu")) is rows
    assert to_host(rows) is rows
    assert to_device(rows, torch.device("meta")).is_meta


@pytest.mark.gpu
@on_gpu
def test_to_a_gpu_they_go_by_pinned_memory_and_come_back_in_such(monkeypatch):
    pinned, pin = [], torch.Tensor.pin_memory

    def noted(rows: torch.Tensor) -> torch.Tensor:
        pinned.append(pin(rows))
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", noted)
    rows = torch.randn(50_000, 16)
    there = to_device(rows, torch.device("cuda"))
    assert there.is_cuda
    assert pinned[0].is_pinned()
    back = to_host(there * 2)
    assert back.is_pinned()
    assert torch.equal(back, rows * 2)


@pytest.mark.gpu
@on_gpu
def test_memory_that_is_taken_again_at_once_does_not_change_what_was_sent():
    batches = [torch.full((100_000, 8), float(number)) for number in range(50)]
    there = [to_device(batch, torch.device("cuda")) for batch in batches]
    assert [float(rows.min()) == float(rows.max()) == at for at, rows in enumerate(there)] == [True] * 50


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


def both(shape, num_rows=7, dimension=3):
    torch.manual_seed(0)
    rows, positions = torch.randn(num_rows, dimension), torch.randint(num_rows, shape)
    return rows.clone().requires_grad_(), rows.requires_grad_(), positions


@pytest.mark.parametrize("shape", [(), (0,), (40,), (4, 5, 6)])
def test_values_and_gradients_are_those_of_torch_to_the_bit(shape):
    ours, theirs, positions = both(shape)
    found, expected = take(ours, positions), embedding(positions, theirs)
    assert torch.equal(found, expected)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_a_gradient_that_is_an_expanded_number_is_taken():
    ours, theirs, positions = both((40,))
    take(ours, positions).sum().backward()
    embedding(positions, theirs).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_a_penalty_on_the_gradient_has_a_gradient_of_its_own():
    ours, theirs, positions = both((40,))
    for rows, taken in ((ours, take(ours, positions)), (theirs, embedding(positions, theirs))):
        (gradient,) = torch.autograd.grad((taken**2).sum(), rows, create_graph=True)
        (gradient**2).sum().backward()
    assert ours.grad.abs().sum() > 0
    assert torch.equal(ours.grad, theirs.grad)


def test_a_gradient_that_is_a_negated_view_is_taken():
    rows: Any = torch.ones(1, 1, requires_grad=True)
    taken = torch.complex(torch.zeros(1, 1), take(rows, torch.tensor([0])))
    (taken.conj() * (2 + 3j)).real.sum().backward()
    assert rows.grad.item() == 3


def test_its_gradient_is_traced():
    def gradient(rows, positions):
        return torch.autograd.grad(take(rows, positions).sum(), rows)[0]

    rows, positions = torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 1, 1])
    traced = make_fx(gradient, tracing_mode="fake")(rows, positions)
    assert traced(rows, positions.flip(0)).tolist() == [[1, 1], [2, 2], [0, 0]]


def test_many_gradients_are_taken_at_once():
    rows = torch.zeros(3, 2, requires_grad=True)
    taken = take(rows, torch.tensor([0, 1]))
    (found,) = torch.autograd.grad(taken, rows, torch.eye(4).reshape(4, 2, 2), is_grads_batched=True)
    assert torch.equal(found[:, :2].reshape(4, 4), torch.eye(4))


def test_a_model_is_compiled_around_it():
    ours, theirs, positions = both((40,))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(rows):
        return (take(rows, positions) ** 2).sum()

    loss(ours).backward()
    (embedding(positions, theirs) ** 2).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
