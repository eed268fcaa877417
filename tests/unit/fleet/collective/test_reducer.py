"""torch's reducer over leaves of any kind, by itself."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fleet.collective.reducer import Reducer


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def halve(_, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


def test_gradients_are_averaged_once_it_has_begun_and_only_once():
    leaf = torch.ones(3, requires_grad=True)  # no torch.nn.Parameter
    reducer = Reducer([leaf], None, hook=halve)
    for begun, expected in ((False, 1.0), (True, 0.5), (False, 1.0)):
        leaf.grad = None
        if begun:
            reducer.begin()
        leaf.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [expected] * 3
    reducer.end()


def test_a_leaf_that_has_moved_or_changed_its_layout_does_not_fit():
    leaf = torch.nn.Parameter(torch.ones(2, 3))
    reducer = Reducer([leaf], None)
    assert reducer.fits()
    leaf.data = leaf.data.t().contiguous().t()
    assert not reducer.fits()
    leaf.data = leaf.data.contiguous()
    assert reducer.fits()
    leaf.data = leaf.data.double()
    assert not reducer.fits()
