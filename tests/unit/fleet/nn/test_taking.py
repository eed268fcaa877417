"""Embeddings by position beside torch's."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import embedding

from fleet.nn.taking import take


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
