"""When the buckets of gradients are laid out anew; nothing here has a GPU, so a captured graph is made up."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fleet.collective.buckets import NOTES, Buckets
from fleet.collective.rendezvous import Place


class Alone:
    """Stands in for a group of one."""

    place = Place(0, 1, "localhost", 1)

    def channel(self) -> None:
        return None

    def use(self, *_: Any) -> None:
        pass

    def waiting(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class OnGpu(torch.nn.Parameter):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("captured", "remembers"),
    [
        pytest.param(False, False, id="whenever-asked-for"),
        pytest.param(True, False, id="but-not-those-of-a-graph"),
        pytest.param(False, True, id="but-not-those-of-which-something-is-remembered"),
    ],
)
def test_buckets_are_laid_out_anew(monkeypatch, captured, remembers):
    parameter = OnGpu(torch.ones(2))
    buckets = Buckets(cast("Any", Alone()), [parameter], remembers=remembers)
    buckets.connect()
    reducers = []
    for passes in range(4):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda now=captured and passes == 1: now
        )
        buckets.begin()
        reducers.append(buckets.reducer)
        (parameter.sum() + buckets.notes.leaf.sum()).backward()
        assert (buckets.order is None) == (passes == 0 or reducers[-1] not in reducers[:-1])
        buckets.end([NOTES, 0], {0} if passes in (1, 2) else ())
    kept = [one is other for one, other in itertools.pairwise(reducers)]
    assert kept == [True, captured or remembers, True]
    assert (buckets.order, buckets.once_unused) == ([NOTES, 0], [0])
