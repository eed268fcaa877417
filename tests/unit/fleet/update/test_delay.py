import pytest
import torch

from fleet.update import compensate_delay


def test_a_gradient_without_delay_is_itself():
    gradient, value = torch.randn(3, 2), torch.randn(3, 2)
    assert torch.equal(compensate_delay(gradient, value, value.clone()), gradient)


def test_the_drift_counts_with_the_square_of_the_gradient():
    found = compensate_delay(torch.tensor([2.0, -3.0]), torch.tensor([1.5, 1.0]), torch.tensor([1.0, 2.0]))
    assert found.tolist() == [2.0 + 4.0 * 0.5, -3.0 + 9.0 * -1.0]


def test_nothing_is_modified():
    given = [torch.ones(2), torch.full((2,), 3.0), torch.zeros(2)]
    copies = [each.clone() for each in given]
    compensate_delay(*given)
    assert all(torch.equal(each, copy) for each, copy in zip(given, copies, strict=True))


def test_other_shapes_are_named():
    with pytest.raises(ValueError, match=r"gradient of shape \[2\], a value of \[3\] and .* \[2\]"):
        compensate_delay(torch.ones(2), torch.ones(3), torch.ones(2))
