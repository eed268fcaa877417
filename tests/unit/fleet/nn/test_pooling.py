"""Embeddings and bags of distinct rows beside torch's of the whole table."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import embedding, embedding_bag

from fleet.errors import ConfigurationError
from fleet.nn.embedding import offsets_of, pool, take


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
