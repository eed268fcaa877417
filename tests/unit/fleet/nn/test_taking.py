"""Embeddings by position beside torch's."""

import pytest
import torch
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


def test_a_model_is_compiled_around_it():
    ours, theirs, positions = both((40,))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(rows):
        return (take(rows, positions) ** 2).sum()

    loss(ours).backward()
    (embedding(positions, theirs) ** 2).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
