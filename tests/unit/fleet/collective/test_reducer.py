"""torch's reducer, when its buckets are laid out, and the flags that it averages; there is no GPU here."""

import itertools
from typing import Any, cast

import pytest
import torch

from fleet.collective.reducer import FLAG_BITS, FLAGS, Buckets, Flags, Reducer
from tests.support.collective import GroupOfOne

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("process_group")


def halve(_, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


def test_begin_averages_one_pass():
    leaf = torch.ones(3, requires_grad=True)  # no torch.nn.Parameter
    buckets = Buckets([leaf], None, hook=halve)
    for begun, expected in ((False, 1.0), (True, 0.5), (False, 1.0)):
        leaf.grad = None
        if begun:
            buckets.begin()
        leaf.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [expected] * 3
    buckets.follow_order()


def test_a_leaf_with_another_layout_or_dtype_does_not_fit():
    leaf = torch.nn.Parameter(torch.ones(2, 3))
    buckets = Buckets([leaf], None)
    assert buckets.fits()
    leaf.data = leaf.data.t().contiguous().t()
    assert not buckets.fits()
    leaf.data = leaf.data.contiguous()
    assert buckets.fits()
    leaf.data = leaf.data.double()
    assert not buckets.fits()


class OnGpu(torch.nn.Parameter):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("captured", "stateful"),
    [
        pytest.param(False, False, id="whenever-asked-for"),
        pytest.param(True, False, id="but-not-those-of-a-graph"),
        pytest.param(False, True, id="but-not-those-of-which-something-is-remembered"),
    ],
)
def test_buckets_are_laid_out_again(monkeypatch, captured, stateful):
    parameter = OnGpu(torch.ones(2))
    reducer = Reducer(cast("Any", GroupOfOne()), [parameter], stateful=stateful)
    reducer.connect()
    layouts = []
    for passes in range(4):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda now=captured and passes == 1: now
        )
        reducer.begin()
        layouts.append(reducer.buckets)
        (parameter.sum() + reducer.flags.leaf.sum()).backward()
        assert (reducer.order is None) == (passes == 0 or layouts[-1] not in layouts[:-1])
        reducer.end([FLAGS, 0], {0} if passes in (1, 2) else ())
    kept = [one is other for one, other in itertools.pairwise(layouts)]
    assert kept == [True, captured or stateful, True]
    assert (reducer.order, reducer.once_unused) == ([FLAGS, 0], [0])


def exchanged(flags: Flags, trainers: list[tuple[list[int], int]]) -> Flags:
    """Return the flags of one of these trainers, as if a reducer had averaged all."""
    parts = [flags.gradient(absent, number) / len(trainers) for absent, number in trainers]
    flags.leaf.grad = torch.stack(parts).sum(0)
    return flags


@pytest.mark.parametrize("size", [2, 3, 255, 1000])
def test_a_number_that_differs_in_any_bit_is_noticed(size):
    number = 0xDEADBEEF
    alike: list[tuple[list[int], int]] = [([], number)] * (size - 1)
    assert exchanged(Flags(0, size, CPU), [*alike, ([], number)]).are_equal()
    for bit in range(FLAG_BITS):
        assert not exchanged(Flags(0, size, CPU), [*alike, ([], number ^ 1 << bit)]).are_equal()


def test_a_number_that_is_the_mean_of_the_others_is_noticed():
    assert not exchanged(Flags(0, 3, CPU), [([], 2), ([], 1), ([], 3)]).are_equal()


def test_delayed_flags_are_those_of_their_own_exchange():
    flags = Flags(0, 2, CPU, delay=2)
    pairs = ([1, 1], [1, 2], [2, 2], [2, 2], [2, 2])
    answers = [exchanged(flags, [([], number) for number in pair]).are_equal() for pair in pairs]
    assert answers == [True, True, True, False, True]


def test_a_parameter_is_unused_if_no_trainer_has_its_gradient():
    flags = exchanged(Flags(3, 2, CPU), [([1, 2], 0), ([2], 0)])
    assert flags.unused([1, 2]) == {2}
    assert flags.unused([]) == set()


def test_flags_of_many_trainers_are_float64():
    assert Flags(0, 1000, CPU).leaf.dtype is torch.float32
    assert Flags(0, 8000, CPU).leaf.dtype is torch.float64
